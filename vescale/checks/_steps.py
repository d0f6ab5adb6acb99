"""``StepChecks``: the ranks of a mesh compare what they are about to do, before they communicate.

==========  ===================================================================================================
event       what must agree
==========  ===================================================================================================
forward     of a model from its root: the model, training or evaluation, with or without gradients; what it is given
backward    of such a forward
read        of a value that is cut over ranks (``item()``, ``full_tensor()``), outside of forwards: among the ranks along
            the axes over which it is cut
==========  ===================================================================================================

How they compare:

=================================  ==================================================================================
forwards                           each event
=================================  ==================================================================================
the first ones of a model          all wait for each other in a round through the store, up to the fourth forward
later ones                         a digest of all events of a step is sent before its backward
                                   (:class:`vescale.agreement.Heartbeat`), 12 bytes, and before a read by all ranks. In the
                                   memory of the host, where ranks wait in each collective, they wait for it, and no
                                   message meets one of another size; on a device it is looked at before the next one is
                                   sent. Where neither follows, one is sent for 32 events. Ranks that wait for each other in
                                   different events find out by :class:`vescale.agreement.Watch`. In every
                                   ``VESCALE_CHECK_EVERY``-th forward descriptions go to the store, too, and a later
                                   forward reads those of all ranks
with parts of a batch              each forward gathers their sizes, for which all wait; on a device only once the parts of a
                                   model have had different sizes in one of its first forwards
with VESCALE_CHECK=steps           all wait for each other in a round through the store
=================================  ==================================================================================

Values are compared in the first 3 forwards and in every ``VESCALE_CHECK_EVERY``-th (100): sums of all bits. In the other
forwards shapes, dtypes, numbers of Python, and a few elements of tensors in the host's memory are. An error is raised on
every rank that has come.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vescale.agreement import Apart, HandedIn, Heartbeat, Round, Watch, first_difference
from vescale.checks._descriptions import call_site, digest_of, hash_of, sampled_rows
from vescale.checks._mismatches import (
    COMPUTED,
    SAME_STEPS,
    SEVERAL_THREADS,
    UNKNOWN,
    InputMismatchError,
    StepMismatchError,
    compare_data,
    places_text,
    uneven_text,
)
from vescale.comm import all_gather_into, group_of_ranks
from vescale.compat import has_dispatch_modes, is_alone, message_device, without_modes
from vescale.compat.devices import accelerator_module, is_capturing
from vescale.errors import ArgumentError, ConsensusError, RepeatedPartsWarning

# What is checked while a script runs: ``VESCALE_CHECK``, ``VESCALE_CHECK_EVERY`` and :func:`unchecked`.


FIRST = 3
"""So many forwards are compared at first."""
_MODES = ("", "steps", "off")
_THREAD = threading.local()


def check_mode() -> str:
    """``VESCALE_CHECK``: "steps", "off", or "" for the default. Raises ValueError for others."""
    mode = os.environ.get("VESCALE_CHECK", "")
    if mode not in _MODES:
        raise ArgumentError(f"VESCALE_CHECK is {mode!r}; set it to 'steps' or 'off', or unset it")
    return mode


def check_every() -> int:
    """``VESCALE_CHECK_EVERY``, 100 by default: values are compared in every so many forwards after the first three; 0: in
    none. Raises ValueError for what is no such number."""
    text = os.environ.get("VESCALE_CHECK_EVERY", "100")
    if not text.isdecimal():
        raise ArgumentError(f"VESCALE_CHECK_EVERY is {text!r}; set it to a number of forwards (0: never), or unset it")
    return int(text)


@contextmanager
def unchecked() -> Iterator[None]:
    """What this thread passes to models inside is not compared between ranks: for values that differ on purpose, on every
    rank. Steps are compared nevertheless (``VESCALE_CHECK=off`` in the environment compares nothing)."""
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


def is_unchecked() -> bool:
    return bool(getattr(_THREAD, "depth", 0))


# ``AxisMeetings``: which ranks of a mesh meet where a value is cut along some of its axes.


class AxisMeetings:
    """Channels: number 0 of all ranks, and one for each part of the axes, on which ranks meet that differ along these axes
    only.

    Args:
        coordinates: of each rank.
    """

    def __init__(self, coordinates: Sequence[tuple[int, ...]]) -> None:
        self._coordinates = coordinates
        ndim = len(coordinates[0])
        self._axes = [axis for axis in range(ndim) if len({each[axis] for each in coordinates}) > 1]
        parts = [part for size in range(1, len(self._axes)) for part in itertools.combinations(self._axes, size)]
        self._numbers = {part: number for number, part in enumerate(parts, 1)}

    @property
    def count(self) -> int:
        return 1 + len(self._numbers)

    def channel(self, axes: Sequence[int]) -> int:
        """Of a value that is cut along ``axes``, some of which are of more than one rank."""
        return self._numbers.get(tuple(axis for axis in self._axes if axis in axes), 0)

    def channels(self) -> list[list[tuple[int, ...]]]:
        """Of each channel, for each rank, the positions of those that it meets."""
        everyone = tuple(range(len(self._coordinates)))
        found: list[list[tuple[int, ...]]] = [[everyone] * len(everyone)]
        for part in self._numbers:
            keys = [tuple(x for axis, x in enumerate(each) if axis not in part) for each in self._coordinates]
            groups: dict[tuple[int, ...], list[int]] = {}
            for index, key in enumerate(keys):
                groups.setdefault(key, []).append(index)
            whole = {key: tuple(group) for key, group in groups.items()}
            found.append([whole[key] for key in keys])
        return found


# What ranks compare at one event.

Rows = Sequence[tuple[str, str]]


class Site(NamedTuple):
    """What is about to be done, and the number of the model if it is one model's."""

    text: str
    model: int = 0


class LocalPart:
    """An input of which each rank gives its part.

    Attributes:
        name: of the input; shape: of this rank's part; text: what its replicas must have, too.
        axes: of the mesh, along which ranks have different parts.
    """

    __slots__ = ("axes", "name", "shape", "text")

    def __init__(self, name: str, shape: Sequence[int], text: str, axes: Sequence[int]) -> None:
        self.name, self.shape, self.text, self.axes = name, tuple(shape), text, tuple(axes)


def part_keys(parts: Sequence[LocalPart], coordinates: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of each rank, which part it has."""
    axes = sorted({axis for part in parts for axis in part.axes})
    return [tuple(coordinate[axis] for axis in axes) for coordinate in coordinates]


# Parts of a batch that are the same on all ranks: each rank was given the global batch, and the plan takes it as a
# part.


class RepeatedParts:
    """Looks at the first forwards of a model, and warns once, on its first rank."""

    def __init__(self, is_first_rank: bool) -> None:
        self._is_first_rank = is_first_rank
        self._count = 0

    def look(self, names: Sequence[str], keys: Sequence[Hashable], values: Sequence[object]) -> None:
        """``keys``: which part each rank gives; ``values``: what tells all that it gives apart."""
        if self._count < 0 or len(set(keys)) < 2:
            return
        self._count = self._count + 1 if len(set(values)) == 1 else -1
        if self._count == FIRST:
            self._count = -1
            if self._is_first_rank:
                shown = ", ".join(map(repr, names[:4]))
                warnings.warn(
                    RepeatedPartsWarning(
                        f"in {FIRST} forwards, all ranks passed the same values as their parts of {shown}: because "
                        'of given="local" in the plan, they are treated as different rows of a correspondingly '
                        'larger batch. If every rank reads the global batch, remove given="local" from the entry; '
                        "if each rank has its own rows, draw them with"
                        " vescale.ShardedBatchSampler"
                    ),
                    stacklevel=2,
                )


def _place(site: Site, where: str) -> str:
    return f"{site.text} ({where})" if where else site.text


class _Event(NamedTuple):
    """``where``: the line of the program; ``inputs``: as they were described; ``sampled``: rows about what was sampled."""

    site: Site
    where: str
    inputs: Rows
    sampled: Callable[[], Rows]
    parts: Sequence[tuple[str, tuple[int, ...], str, tuple[int, ...]]]

    def place(self) -> str:
        return _place(self.site, self.where)

    def description(self) -> dict[str, Any]:
        inputs = [*self.inputs, *self.sampled()]
        text, model = self.site
        return {"site": text, "model": model, "where": self.where, "inputs": inputs, "parts": self.parts}


class StepChecks:
    """The checks on one mesh, and all that are equal to it, or among some ranks; use
    :func:`vescale.checks.start_checks` or :func:`vescale.checks.start_checks_among`.

    Args:
        ranks: and their ``coordinates``.

    Attributes:
        is_on: whether there is somebody to compare with.
        waits: whether ranks wait for each other, in this forward and its backward.
        is_due: whether values are compared in this forward: sums of all bits.
        samples: whether what is given in this forward is compared by samples of it, and described only where these differ.
        names_gradients: whether ranks have gradients of the same parameters; not in local regions.
        num_models: that are, or were, compared here. Models are known by their numbers, as they may be of one class.
    """

    def __init__(self, ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> None:
        self.ranks, self._coordinates = tuple(ranks), coordinates
        self._has_others = len(self.ranks) > 1 and dist.get_rank() in self.ranks
        self._meetings = AxisMeetings(coordinates)
        self._channels: list[tuple[int, ...]] = []  # the ranks that this one meets on each channel
        self._consensus: list[Round] = []
        self._is_ready = False
        self._forwards = 0
        self._awaited: tuple[str, int, int] | None
        self.num_models = 0
        self.names_gradients = True
        self._noted: list[tuple[str, str]]
        self._handed_in: deque[tuple[int, HandedIn]] = deque()  # by channel: descriptions that are to be compared
        self._differences: Round
        self._heartbeat: Heartbeat | None = None  # of ranks that do not wait for each other
        self._watch: Watch
        self._untold: list[_Event] = []  # that no heartbeat has carried yet
        self._digest = 0  # of these
        self._last = ""  # where this rank was when one was sent
        self._uneven: set[int] = set()  # models whose ranks have given parts of different sizes
        self._lock = threading.Lock()  # one event at a time
        self._threads: set[int] = set()  # that have run forwards
        self.begin()

    def begin(self) -> None:
        """A new model; settings are read anew."""
        self.num_models += 1
        self._mode, self._every = check_mode(), check_every()
        self._host_waits = accelerator_module() is None  # in each collective
        self.is_on = self._has_others and self._mode != "off"
        self.is_due, self.samples = True, False
        self._forwards, self._noted, self._awaited = 0, [], None
        self._settle()
        self._repeated = RepeatedParts(self._has_others and dist.get_rank() == self.ranks[0])
        self._threads.clear()

    @property
    def compares_data(self) -> bool:
        """Whether what is given in this forward is compared."""
        return self.is_on and not is_unchecked()

    def is_comparing(self) -> bool:
        """Whether ranks compare the backwards of models here."""
        return self.is_on

    def begin_forward(self, number: int) -> None:
        """``number`` of the model's forward, from 1."""
        if not self._is_ready:
            self.start()
        self._forwards = number
        self.is_due = number <= FIRST or (self._every > 0 and number % self._every == 0)
        self.waits = self._mode == "steps" or number <= FIRST + 1
        self.samples = not self.is_due and not self.waits

    def begin_backward(self, number: int) -> None:
        """``number`` of a backward by all ranks, which may have run different numbers of forwards."""
        self.waits = self._mode == "steps" or number <= FIRST + 1

    def forward(
        self, model: str, mode: str, inputs: Rows, parts: Sequence[LocalPart], number: int = 0
    ) -> list[Mapping[int, Any]] | None:
        """Before a forward of a model, and its number. Returns None, or where ranks give parts of different sizes, the shape
        of each part by position of the rank.

        Raises StepMismatchError and InputMismatchError, on every rank that comes.
        """
        self._threads.add(threading.get_ident())
        return self._meet(f"forward {self._forwards} of {model}, {mode}", inputs, parts, model=number)

    def sampled_forward(self, model: str, mode: str, seen: Any, named: Callable[..., Any], number: int = 0) -> None:
        """The same where :attr:`samples`, for what ranks have seen of their inputs (:func:`vescale.checks.sample`; None:
        nothing), of which ``named`` tells the names."""
        self._threads.add(threading.get_ident())
        with self._lock:
            site = Site(f"forward {self._forwards} of {model}, {mode}", number)
            rows = list if seen is None else (lambda: sampled_rows(seen, named))
            self._add(site, self._with_noted(()), rows, (), seen)

    def await_backward(self, model: str, number: int = 0) -> int:
        """After a forward with gradients, which number it has."""
        self._awaited = model, self._forwards, number
        return self._forwards

    def backward(self, model: str, step: int, number: int = 0) -> None:
        """Before the backward of a forward."""
        self._awaited = None
        if not self._is_ready:  # ranks have left where they met, since that forward
            return
        self._meet(f"the backward of forward {step} of {model}", (), (), model=number)
        self.tell()

    def replicas(self, model: str, rows: Rows, axes: Sequence[int]) -> None:
        """In a forward: parameters of which ranks that differ along ``axes`` only have the same part.

        Raises InputMismatchError, on every rank of these.
        """
        self._meet(f"forward {self._forwards} of {model}", rows, (), self._meetings.channel(axes))

    def finish(self) -> None:
        """Of ranks that had no backward, where others may have had one."""
        if self._awaited is not None:
            if self.is_due:
                self.note(COMPUTED, UNKNOWN)  # its rows may have no part in a loss
            self.backward(*self._awaited)

    def agree(self, what: str, rows: Rows) -> None:
        """Compare values that are the same on every rank; all wait for each other.

        Raises StepMismatchError and InputMismatchError, on every rank that comes.
        """
        if self.is_on and not is_unchecked():
            if not self._is_ready:
                self.start()
            self._compare(self._exchange(self._description(Site(what), rows, ())))

    def step(self, what: str, axes: Sequence[int] | None = None, number: int = 0) -> None:
        """Before something that all ranks do, or those that differ from this one along ``axes`` only; with the model
        ``number``, if it is one model's."""
        if self.is_on and self._is_ready:
            self._meet(what, (), (), 0 if axes is None else self._meetings.channel(axes), number)

    def read(self, what: str, axes: Sequence[int]) -> None:
        """Before a value is read whose parts are on the ranks along ``axes``."""
        self.step(f"a read of {what}", axes)
        if self.is_on and self._is_ready and not self._meetings.channel(axes):
            self.tell()

    def note(self, name: str, text: str) -> None:
        """Something that is the same on every rank was given outside of a forward: compared with the next event."""
        if text == UNKNOWN and (name, text) in self._noted:
            return
        if text != UNKNOWN and len(self._noted) >= _MAX_NOTED:  # their hash, so that one that differs is found
            earlier = self._noted.pop()
            name, text = f"{name} or one before it", hash_of("".join((*earlier, name, text)))
        self._noted.append((name, text))

    # One event

    def start(self) -> None:
        """All ranks together: places to meet, which nobody has used. Where an error has ended the events of some ranks
        earlier than those of others, what was used before would make them wait for each other."""
        if not self.is_on:
            return
        with self._lock:
            self._is_ready = True
            self._noted = []
            channels, own = self._meetings.channels(), self.ranks.index(dist.get_rank())
            self._channels = [tuple(self.ranks[index] for index in peers[own]) for peers in channels]
            self._consensus = [
                Round(ranks, f"steps {number} of {self.ranks}" if number else "steps", warns=False)
                for number, ranks in enumerate(self._channels)
            ]
            # Not one of those above: ranks may have handed in other descriptions by then, or none.
            self._differences = Round(self.ranks, "steps that differ", warns=False)
            self._handed_in.clear()
            self._untold, self._digest = [], 0
            if not is_alone():  # else maybe inside of a world that has this group
                self._open_heartbeat()
            self._device = message_device()
            name = f"waits in steps of {self.ranks}"
            self._watch = Watch(self.ranks, name, self._in_different_events, self._have_ended)
            self._watch.open()
            self._settle()

    def _open_heartbeat(self) -> None:
        if self._heartbeat is None and self._mode != "steps":
            group = group_of_ranks(tuple(sorted(self.ranks)), "steps")
            self._heartbeat = Heartbeat(group, "comparison of steps", num_first=0)

    def _leave(self) -> None:
        """Ranks are in events that do not pair, and their numbers differ from now on. All of them learn it, those that come
        late too, because what was written where they met stays; so all meet elsewhere, from the next forward on."""
        self._is_ready = False
        if self._heartbeat is not None:
            self._heartbeat.begin_anew()

    def _settle(self) -> None:
        self.waits = self._mode == "steps" or self._forwards <= FIRST

    def _meet(
        self, site: str, inputs: Rows, parts: Sequence[LocalPart], channel: int = 0, model: int = 0
    ) -> list[Mapping[int, Any]] | None:
        with self._lock:
            return self._meet_alone(Site(site, model), inputs, parts, channel)

    def _meet_alone(
        self, site: Site, inputs: Rows, parts: Sequence[LocalPart], channel: int
    ) -> list[Mapping[int, Any]] | None:
        if not channel:  # of what all ranks are given
            inputs = self._with_noted(inputs)
        if not self.waits:
            return self._meet_later(site, inputs, parts, channel)
        where = _where(site)
        if not channel:
            self._watch.begin(digest_of(site), site.model, _place(site, where))
        found = self._exchange(self._description(site, inputs, parts, where), channel)
        shapes = self._compare(found, channel)
        if parts and self.is_due:
            texts = [str(each["parts"]) for each in found]
            self._repeated.look([part.name for part in parts], part_keys(parts, self._coordinates), texts)
        if self._mode != "steps":
            if shapes:
                self._uneven.add(site.model)
            if self._forwards > FIRST and site.text.startswith("forward"):
                self.waits = False  # all ranks are here
        return shapes

    def _with_noted(self, inputs: Rows) -> Rows:
        if not self._noted:
            return inputs
        noted, self._noted = self._noted, []
        return (*noted, *inputs)

    def _advice(self) -> str:
        return SAME_STEPS + (SEVERAL_THREADS if len(self._threads) > 1 else "")

    # Descriptions, where digests differ or nobody waits

    def _description(self, site: Site, inputs: Rows, parts: Sequence[LocalPart], where: str | None = None) -> bytes:
        own = {
            "site": site.text,
            "model": site.model,
            "where": call_site() if where is None else where,
            "inputs": list(inputs),
            "parts": [[part.name, part.shape, part.text, part.axes] for part in parts],
        }
        return json.dumps(own).encode()

    def _exchange(self, message: bytes, channel: int = 0) -> list[dict[str, Any]]:
        own = json.loads(message)
        consensus = self._consensus[channel]
        try:
            messages = consensus.exchange(message, lambda: _place(Site(own["site"]), own["where"]))
        except ConsensusError as error:
            self._leave()
            places = f"rank {dist.get_rank()} is before {error}"
            if error.elsewhere:
                places = f"ranks run different steps: {error.elsewhere}"
            raise StepMismatchError(f"{places}. {self._advice()}", error.ranks) from None
        return self._described(messages, channel)

    # Later events

    def _meet_later(
        self, site: Site, inputs: Rows, parts: Sequence[LocalPart], channel: int
    ) -> list[Mapping[int, Any]] | None:
        given = parts
        gathers_sizes = bool(parts) and (site.model in self._uneven or self._host_waits)
        if gathers_sizes:
            parts = [LocalPart(part.name, (), part.text, part.axes) for part in parts]
        if not channel:
            self._add(site, inputs, list, parts)
        if self.is_due and site.text.startswith("forward") and not self._consensus[channel].is_alone:
            message = self._description(site, inputs, parts)
            handed_in = self._consensus[channel].hand_in(message, lambda found: self._are_alike(found, channel))
            self._handed_in.append((channel, handed_in))
        return self._gathered_shapes(site, inputs, given) if gathers_sizes else None

    def _add(
        self, site: Site, inputs: Rows, sampled: Callable[[], Rows], parts: Sequence[LocalPart], seen: object = None
    ) -> None:
        """An event of all ranks, to those that no heartbeat has carried yet."""
        if site.text.startswith("forward"):
            self._look_at_earlier()
        event = _Event(site, _where(site), inputs, sampled, [(p.name, p.shape, UNKNOWN, p.axes) for p in parts])
        told = () if any(text == UNKNOWN for _, text in inputs) else inputs
        self._digest = digest_of((self._digest, *site, told, [(p.name, p.shape) for p in parts], seen))
        self._untold.append(event)
        self._watch.begin(digest_of(site), site.model, event.place())
        if len(self._untold) >= _MOST_UNTOLD:
            self._send()

    def tell(self) -> None:
        """Before a backward, and a read by all ranks: they communicate next."""
        if not self.waits:
            with self._lock:
                self._send()
                if self._heartbeat is not None and self._host_waits:
                    self._heartbeat.settle()

    def _gathered_shapes(self, site: Site, inputs: Rows, parts: Sequence[LocalPart]) -> list[Mapping[int, Any]] | None:
        """The shape of each part by position of the rank; all ranks wait. Where they give other parts, or parts with other
        numbers of dims, they compare descriptions, which raises."""
        assert self._heartbeat is not None
        row = [len(parts), *(size for part in parts for size in (len(part.shape), *part.shape))]
        row += [0] * (_SHAPE_NUMBERS - len(row))
        with without_modes():
            own = torch.tensor(row, device=message_device())
            out = own.new_empty((len(self.ranks), len(row)))
            group = self._heartbeat.group
            rows = all_gather_into(out, own, group, requester="sizes of parts").wait().tolist()
        by_rank = dict(zip(sorted(self.ranks), rows, strict=True))
        shapes: list[dict[int, Any]] = [{} for _ in parts]
        for index, rank in enumerate(self.ranks):
            numbers = iter(by_rank[rank])
            if next(numbers) != len(parts):
                return self._compare(self._exchange(self._description(site, inputs, parts)))
            for shape, part in zip(shapes, parts):
                if next(numbers) != len(part.shape):
                    return self._compare(self._exchange(self._description(site, inputs, parts)))
                shape[index] = tuple(next(numbers) for _ in part.shape)
        return [*shapes] if any(len(set(each.values())) > 1 for each in shapes) else None

    def _send(self) -> None:
        """The digest of what has not been told, when that of earlier events has been looked at."""
        if not self._untold or self._mode == "steps" or (not self._host_waits and is_capturing()):
            return
        self._open_heartbeat()
        assert self._heartbeat is not None
        told, digest = self._untold, self._digest.to_bytes(_DIGEST_BYTES, "little")
        self._last = told[-1].place()
        self._untold, self._digest = [], 0
        message = bytearray(digest) + bytearray(255 - byte for byte in digest)  # maxima fit if all ranks send the same
        with without_modes() if has_dispatch_modes() else nullcontext():
            self._heartbeat.send(message, self._device, lambda maximum: self._look_at(maximum, told))

    def _look_at(self, maximum: Sequence[int], told: Sequence[_Event]) -> None:
        """At what the ranks have sent together, ``told`` on this one."""
        if all(a + b == 255 for a, b in zip(maximum[:_DIGEST_BYTES], maximum[_DIGEST_BYTES:], strict=True)):
            return
        message = json.dumps([event.description() for event in told]).encode()
        every = [json.loads(text) for text in self._differences.exchange(message, lambda: "comparing the last step")]
        nothing = {"site": "what comes later", "model": 0, "where": "", "inputs": [], "parts": []}
        by_rank = dict(zip(self._differences.ranks, every))
        for events in itertools.zip_longest(*(by_rank[rank] for rank in self.ranks), fillvalue=nothing):
            self._refuse_differences(events)

    def _in_different_events(self, found: Apart) -> StepMismatchError:
        """Of ranks that wait for each other."""
        places = {rank: f"before {entry[2]}" for rank, entry in found.entries.items()} | found.texts
        texts = "; ".join(f"rank {rank} is {place}" for rank, place in sorted(places.items())[:16])
        difference = first_difference("", {rank: [("", place)] for rank, place in places.items()})
        return StepMismatchError(f"ranks run different steps: {texts}. {self._advice()}", difference.ranks)

    def _have_ended(self, ends: Mapping[int, str]) -> StepMismatchError | None:
        """Of ranks whose programs have ended, and how, where a wait of this one has failed."""
        own = self._untold[-1].place() if self._untold else self._last
        if not own:
            return None
        texts = [f"rank {rank} has ended {how}" for rank, how in ends.items()]
        if not texts:
            why = str(sys.exc_info()[1]).partition("This is typically")[0].strip()
            texts = [f"its wait for other ranks has failed, as where one of them has ended: {why}"]
        return StepMismatchError(
            f"rank {dist.get_rank()} is in {own}, and {'; '.join(texts)}. {self._advice()}", [*ends]
        )

    def _look_at_earlier(self) -> None:
        """At the descriptions of earlier forwards, if all ranks have handed theirs in. Nobody waits."""
        while self._handed_in and (messages := self._handed_in[0][1].messages()) is not None:
            channel, _ = self._handed_in.popleft()
            if messages:
                self._refuse_differences(self._described(messages, channel), channel)

    def _refuse_differences(self, found: Sequence[dict[str, Any]], channel: int = 0) -> None:
        """All ranks call it together, or one after the other."""
        try:
            if self._compare(found, channel):
                raise InputMismatchError(uneven_text(found, self.ranks), self.ranks)
        except StepMismatchError:
            self._leave()
            raise

    def _are_alike(self, messages: list[bytes], channel: int) -> bool:
        try:
            return not self._compare(self._described(messages, channel), channel)
        except (StepMismatchError, InputMismatchError):  # as all ranks raise
            return False

    def _described(self, messages: Sequence[bytes], channel: int = 0) -> list[dict[str, Any]]:
        found = dict(zip(self._consensus[channel].ranks, messages))
        return [json.loads(found[rank]) for rank in self._channels[channel]]

    def _compare(self, found: Sequence[dict[str, Any]], channel: int = 0) -> list[Mapping[int, Any]] | None:
        ranks = self._channels[channel]
        if len({each["site"] for each in found}) == 1 < len({each["model"] for each in found}):
            for each in found:
                each["site"] += f", model {each['model']} on these ranks"
        if len({each["site"] for each in found}) > 1:
            places = {rank: _place(Site(each["site"]), each["where"]) for rank, each in zip(ranks, found)}
            sites = {rank: each["site"] for rank, each in zip(ranks, found)}
            raise StepMismatchError(*places_text(places, self._advice(), sites))
        return compare_data(found, ranks, self._coordinates)


_MAX_NOTED = 256
_MOST_UNTOLD = 32
_DIGEST_BYTES = 6
# That the sizes of all parts are gathered with: at least so many, so that ranks with fewer parts come with as many.
_SHAPE_NUMBERS = 64


def _where(site: Site) -> str:
    """The line of the program; of a backward, autograd's call is none."""
    return "" if site.text.startswith("the backward") else call_site()
