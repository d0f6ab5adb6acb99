"""``CollectiveOrder``: which units this rank has gathered and reduced, for the ranks to compare."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import struct
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist

from vescale.agreement import (
    Apart,
    Beat,
    Heartbeat,
    Round,
    Watch,
    add_post,
    added_posts,
    end_soon,
    first_difference,
    post_once,
)
from vescale.comm import all_gather_into, look_while_waiting
from vescale.compat import is_alone
from vescale.errors import ConsensusError, OrderMismatchError
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._reducer_turns import RootTurn

# ``AgreedCollectives``: before a rank begins a collective, the others know its kind, size and model.


_FEW_RANKS = 64  # numpy, which a step uses nowhere else, takes longer for as many: its code is in no cache
_MARK = 0x7FF9_A57C_7FFB_3E61  # not a number in float64, and in each half as float32 and bfloat16
_NOTICE = struct.Struct("<QQ")
_MOST_GUARDED = 10_000
_MOST_COUNTED = 64  # comparisons in succession
_MOST_KEPT = 1 << 16  # kinds of collectives, or units of a log
_NOTHING = (-1, 0, 0)

Collective = tuple[int, int, int]
"""Its kind, the model whose units it is for, and the bytes of a message."""


class AgreedCollectives:
    """What the ranks of a group begin next, as they have agreed on it.

    What a rank expects follows from the collectives before, since the ranks last compared their order: that which came next
    the last time, if possible the last time after as many comparisons of this kind (several backwards accumulate before one
    reduces); else what has followed such a one before, else one like it. All ranks expect the same, because they agree on
    each change:

    1. A rank that wants to gather where a gather of other pieces, or of another model, is expected waits in the store for
       all others to want the same. If they do not come within 3 s, it tells them in a gather of pieces of the expected size,
       in which its piece is a notice. If all ranks have sent the same one, the collective follows. Otherwise ranks that sent
       one raise, and so do ranks that find one where they expected parameters (on a CPU; a device would have to be waited
       for).
    2. Where another collective is expected, and in the first one of a model, it hands in what it wants, and waits. If ranks
       are in the expected one, :class:`vescale.agreement.Watch` finds it, and all raise; their processes end.

    So steps that are like earlier ones communicate nothing more, a first one asks the store where collectives change, and no
    rank sends a message of a size that its receiver does not expect, which a backend answers with the end of the process
    (gloo), or not at all (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self.watch = group, watch
        self._last = self._last_compared = _NOTHING
        self._consensus = Round(watch.ranks, f"collectives along {group.group_name}")
        self._next: dict[int, Collective] = {}
        self._after: dict[Collective, Collective] = {}
        self._history = self._counted_history = self._num_since = 0
        self._compared = (END_OF_BACKWARD, 0)  # how the ranks have compared last, and how often in succession
        self._place: tuple[object, int] = ("", 0)

    def begin_model(self, place: object) -> None:
        """The ranks have found out together that they run another model. ``place``: the same on all of them, and at no other
        time. What ranks have done before, maybe not all the same, counts no more."""
        self._last = self._last_compared = _NOTHING
        self._place, self._history, self._num_since = (place, 0), hash(place), 0
        self._compared, self._counted_history = (END_OF_BACKWARD, 0), self._history
        self.watch.open()

    def begin(self, kind: int) -> None:
        """The ranks have compared their order, after an iteration. ``kind``: of this comparison."""
        self._last_compared = self._last
        last, count = self._compared
        self._compared = kind, min(count + 1, _MOST_COUNTED) if kind == last else 1
        self._history, self._num_since = hash(self._last[1]), 0  # models may take turns
        self._counted_history = hash((self._compared, self._last[1]))
        self._place = self._place[0], self._place[1] + 1

    def begin_after_error(self) -> None:
        """The ranks have found out that they differ: some have begun what others have not."""
        self._next.clear()
        self._after.clear()
        self._last, self._compared = self._last_compared, (END_OF_BACKWARD, 0)
        self.begin(END_OF_BACKWARD)
        self.watch.begin_anew()

    def agree(self, wanted: Collective, unit: int, device: torch.device) -> bool:
        """Called before each collective, for a ``unit``; False: some rank wants to begin another one.

        Raises OrderMismatchError if not all ranks come.
        """
        self.watch.begin(wanted[0], wanted[2], unit)
        self._num_since += 1
        if self._num_since > _MOST_GUARDED:  # forwards whose backward never comes
            return True
        known = self._next.get(self._counted_history) or self._next.get(self._history)
        expected = known or self._after.get(self._last, self._last)
        if expected != wanted and not self._is_wanted_by_all(expected, wanted, device):
            return False
        if len(self._next) >= _MOST_KEPT:  # every iteration has others; all ranks clear at the same one
            self._next.clear()
            self._after.clear()
        self._next[self._counted_history] = self._next[self._history] = wanted
        if self._last != _NOTHING:
            self._after[self._last] = wanted
        self._counted_history = hash((self._counted_history, wanted))
        self._history, self._last = hash((self._history, wanted)), wanted
        return True

    def _is_wanted_by_all(self, expected: Collective, wanted: Collective, device: torch.device) -> bool:
        text = str(wanted)
        if expected[0] == GATHER and expected[2] >= _NOTICE.size:
            moment = f"comparison {self._place} collective {self._num_since}"
            return self._consensus.have_all_come(moment, text) or self._is_in_notices(expected[2], text, device)
        try:
            found = self._consensus.exchange(text.encode(), lambda: "agreement on the next collective")
        except ConsensusError as error:
            raise OrderMismatchError(
                f"{error}: run the same modules in the same order on every rank", error.ranks
            ) from None
        return len(set(found)) == 1

    def _is_in_notices(self, num_bytes: int, text: str, device: torch.device) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            group, notice = self._group, _NOTICE.pack(_MARK, zlib.crc32(text.encode()))
            piece = torch.zeros(num_bytes, dtype=torch.uint8)
            piece[: _NOTICE.size] = torch.frombuffer(bytearray(notice), dtype=torch.uint8)
            out = torch.empty(num_bytes * group.size(), dtype=torch.uint8, device=device)
            found = all_gather_into(out, piece.to(device), group, requester="agreement on the next collective").wait()
            heads = found.view(group.size(), num_bytes)[:, : _NOTICE.size].cpu().contiguous()
        return all(bytes(head.tolist()) == notice for head in heads)


def has_notice(gathered: torch.Tensor, num_ranks: int) -> bool:
    """Whether a rank has sent a notice in place of its piece. ``gathered`` is in the memory of the host."""
    stride, place = gathered.nbytes // num_ranks, gathered.data_ptr()
    if stride < _NOTICE.size:
        return False
    if num_ranks <= _FEW_RANKS:
        return any(ctypes.c_uint64.from_address(place + rank * stride).value == _MARK for rank in range(num_ranks))
    memory: Any = (ctypes.c_char * gathered.nbytes).from_address(place)
    heads = numpy.ndarray((num_ranks,), numpy.uint64, memory, strides=(stride,))
    return bool((heads == _MARK).any())


# What an ``OrderMismatchError`` says: ranks communicate for different units, or models, at one place of their order.


GATHER, REDUCTION, COMPARISON, END_OF_BACKWARD, KEPT_GATHER = range(5)
_KINDS = (
    "a gather of",
    "a reduction of",
    "the comparison of gathers",
    "the end of the backward",
    "a gather of pieces of",
)


def different_modules(found: str, ranks: Sequence[int]) -> OrderMismatchError:
    return OrderMismatchError(
        f"ranks have run different modules to which fully_shard (or a plan's unit) applies: {found}; a gather is a "
        "collective, so that gathers of different modules would mix their parameters. Run the same modules in the "
        "same order on every rank: apply fully_shard to the block that holds the experts, or run every expert on "
        "every rank, even without tokens",
        ranks,
    )


def waiting_ranks(found: Apart, path: Callable[[int], str]) -> OrderMismatchError:
    """Of ranks that wait for each other; ``path``: of a unit, by its number."""
    texts = dict(found.texts)
    for rank, (kind, num_bytes, unit) in found.entries.items():
        of = f" {path(unit)} ({num_bytes} bytes)" if kind in (GATHER, REDUCTION, KEPT_GATHER) else ""
        texts[rank] = f"{_KINDS[kind]}{of}"
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_of.setdefault(texts[rank], []).append(rank)
    text = " and ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} in {text}"
        for text, ranks in ranks_of.items()
    )
    first = next(iter(found.entries.values()))
    minority = [rank for rank, entry in found.entries.items() if entry != first]
    return different_modules(f"they wait for each other, {text}", sorted(found.texts) or minority)


# ``ReplicaErrors``: what the ranks of one shard group have raised is raised by their replicas, too, which wait for
# them.

# How long a rank waits for replicas that have raised, but whose processes go on: their scripts may begin another step.
_SECONDS_TO_GO_ON = 10.0


class ReplicaErrors:
    """Of all data-parallel ranks, on any hosts.

    Ranks of one shard group find by themselves that they have gathered different units. They raise, and never come where
    their replicas wait for them: before a backward, or in a reduction. So they post the error, and a rank that waits raises
    it, too, if their processes have ended, or if they have not gone on for 10 s. They may go on with another step, if no
    replica has given up by then: the first of them to say so decides.

    Args:
        ranks: all of them; shard_ranks: those of this rank's shard group.

    Attributes:
        has_raised: whether this rank has told of an error, and has not gone on since.
    """

    looks_last = False

    def __init__(self, ranks: Sequence[int], shard_ranks: Sequence[int]) -> None:
        self._ranks, self._members = tuple(ranks), sorted(shard_ranks)
        self._group = self._members[0]
        self._place = ""
        self._num_told = 0
        self.has_raised = False
        self._seen: dict[tuple[int, int], float] = {}
        self._raised: set[tuple[int, int]] = set()

    def open(self) -> None:
        """All ranks call it together. No communication."""
        if not self._place and not is_alone() and len(self._ranks) > len(self._members):
            self._place = Round(self._ranks, "errors of replicas").place
            look_while_waiting(self)

    def tell(self, error: OrderMismatchError) -> None:
        """Before all ranks of the shard group raise it."""
        if not self._place:
            return
        self._num_told, self.has_raised = self._num_told + 1, True
        if dist.get_rank() == self._group:
            told = [self._group, self._num_told, self._members, list(error.ranks), str(error.args[0])]
            with suppress(RuntimeError):  # the rank that holds the store has ended
                add_post(self._place, json.dumps(told))

    def go_on(self) -> None:
        """Before this rank communicates again after an error.

        Raises OrderMismatchError if a replica has given up.
        """
        self.has_raised = False
        if self._place and self._decide(self._group, self._num_told, "goes on") != "goes on":
            raise next(
                error for group, number, _, error in self._told() if (group, number) == (self._group, self._num_told)
            )

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        """See :class:`vescale.comm.Look`; raises OrderMismatchError: for each error of a group once, or when its process has
        ended."""
        for group, number, members, error in self._told():
            if group == self._group or (awaited and not set(members) & set(awaited)):
                continue
            if (group, number) in self._raised and not in_vain:  # the script has caught it
                continue
            since = self._seen.setdefault((group, number), time.monotonic())
            is_late = in_vain or time.monotonic() - since >= _SECONDS_TO_GO_ON
            if is_late and self._decide(group, number, "given up") == "given up":
                if not in_vain:
                    end_soon(error)
                self._raised.add((group, number))
                raise error

    def _decide(self, group: int, number: int, proposed: str) -> str:
        """What the first rank has proposed about this error of the group."""
        with suppress(RuntimeError):  # the rank that holds the store has ended, so that its group does not go on
            return post_once(f"{self._place} {group} {number}", proposed)
        return proposed

    def _told(self) -> list[tuple[int, int, list[int], OrderMismatchError]]:
        """Group, number, members, and error, the latest of each group."""
        with suppress(RuntimeError):  # the rank that holds the store has ended
            rows = [json.loads(text) for text in added_posts(self._place)]
            latest = {group: (number, members, ranks, text) for group, number, members, ranks, text in rows}
            return [
                (group, number, members, OrderMismatchError(text, ranks))
                for group, (number, members, ranks, text) in latest.items()
            ]
        return []


FLAGS_REQUESTER = "which parameters got a gradient"
"""Of the collective with a byte for each parameter of the units along an axis."""

_TRAINED = "requires_grad"
_DIGEST_BYTES = 8
_SLOT_BYTES = 2 * _DIGEST_BYTES  # a digest and its complement: their maxima over the ranks fit if all are equal

Entries = Sequence[tuple[str, str]]


class _Log:
    """Numbers of units in the order of their collectives. What is older than the last 65,536 is kept as a digest."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._earlier, self._num_earlier = b"", 0

    def add(self, number: int) -> None:
        self.numbers.append(number)
        if len(self.numbers) >= 2 * _MOST_KEPT:
            older = self.numbers[:_MOST_KEPT]
            self._earlier, self._num_earlier = _digest(self._earlier, older), self._num_earlier + len(older)
            del self.numbers[:_MOST_KEPT]

    def digest(self) -> bytes:
        return _digest(self._earlier, self.numbers)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def taken(self) -> _Log:
        """All of it, which is begun anew here."""
        found = _Log()
        vars(found).update(vars(self))
        self.clear()
        return found

    def entries(self, what: str) -> list[tuple[str, int]]:
        """Places in the order, and numbers of units."""
        return [(f"{what} {place}", number) for place, number in enumerate(self.numbers, self._num_earlier + 1)]


class _History:
    """What ranks have in common that communicate along the same axes, whichever models they run.

    Attributes:
        along: of the ranks along the axis that shards; across: of all data-parallel ranks, where these are more.
        errors: of the ranks along the axis that shards, for the others.
        reduced: units in the order of their reductions; units: by number, as far as they are there.
        message_bytes: the longest message of a model.
        heartbeat: of all data-parallel ranks, at the end of backwards; gather_heartbeat: along the axis that shards, of
            forwards without a backward.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        shard_group, everyone = axes.shard_group, axes.data_parallel.group
        self.reduced = _Log()
        self.errors = ReplicaErrors(axes.data_parallel_ranks, dist.get_process_group_ranks(shard_group))
        self.along = self._agreed(shard_group, self._told)
        self.across = None
        if axes.num_replicas > 1:
            self.across = self._agreed(everyone, lambda found: waiting_ranks(found, self._path_of))
        else:
            everyone = shard_group
        self.units: weakref.WeakValueDictionary[int, OrderedUnit] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        self.message_bytes = 0
        self.heartbeat = Heartbeat(everyone, FLAGS_REQUESTER)
        self.gather_heartbeat = Heartbeat(shard_group, "which units were gathered")

    def _agreed(self, group: dist.ProcessGroup, error: Callable[[Apart], Exception]) -> AgreedCollectives:
        ranks = dist.get_process_group_ranks(group)
        return AgreedCollectives(group, Watch(ranks, f"waits along {group.group_name}", error))

    def _told(self, found: Apart) -> OrderMismatchError:
        error = waiting_ranks(found, self._path_of)
        self.errors.tell(error)
        return error

    def agreed(self, across_replicas: bool = True) -> list[AgreedCollectives]:
        found = [self.along, self.across if across_replicas else None]
        return [each for each in found if each is not None]

    def _path_of(self, number: int) -> str:
        return self.name_of(number)[0]

    def name_of(self, number: int) -> tuple[str, str]:
        """Its path, and a longer name for where other units have this path, too."""
        unit = self.units.get(number)
        path, model = ("a module", "a model") if unit is None else (unit.path() or "the root", unit.order.model)
        return path, f"{path} of {model} (number {number} of the modules passed to fully_shard)"


# By default group, then by the name of the group along which there are shards, and all data-parallel ranks.
_HISTORIES: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], _History]] = weakref.WeakKeyDictionary()


def _history(axes: DataParallelAxes) -> _History:
    known = _HISTORIES.setdefault(dist.group.WORLD, {})
    shard_group = axes.shard_group
    key = shard_group.group_name, axes.data_parallel_ranks
    if key not in known:
        known[key] = _History(axes)
    return known[key]


def next_unit_number(axes: DataParallelAxes) -> int:
    """Of units that communicate along ``axes``, of all models, in the order in which they were made: from 1. On a
    rank outside of the mesh: 0."""
    return 0 if axes.mesh.get_coordinate() is None else next(_history(axes).numbers)


class OrderedUnit:
    """A unit among those that communicate along the same axes; ``first_flag``: of its parameters, among its model's."""

    def __init__(self, order: CollectiveOrder, number: int, first_flag: int, path: Callable[[], str]) -> None:
        self.order, self.number, self.first_flag, self.path = order, number, first_flag, path

    def gathers(self) -> None:
        self.order.gathered.add(self.number)

    def begins_gather(self, num_bytes: int) -> None:
        """Before each gather, from all ranks of the shard group, of pieces of ``num_bytes``.

        Raises OrderMismatchError on every rank if another one wants to gather another size, or a unit of another model, or
        begins another collective.
        """
        self._begins(GATHER, num_bytes)

    def begins_gather_of_kept(self, num_bytes: int) -> None:
        """The same from some of them, which have kept pieces."""
        self._begins(KEPT_GATHER, num_bytes)

    def _begins(self, kind: int, num_bytes: int) -> None:
        history = self.order.history
        if history.errors.has_raised:
            history.errors.go_on()
        self.order.agree(history.along, kind, num_bytes, self.number)

    def check_gathered(self, gathered: torch.Tensor) -> None:
        """After a gather, before its data are used; raises as :meth:`begins_gather`."""
        group = self.order.shard_group
        if gathered.is_cpu and group.size() > 1 and has_notice(gathered, group.size()):
            self.order.raise_difference(group)

    def reduces(self, across_replicas: bool, num_bytes: int) -> None:
        """Before each reduction of the unit, of ``num_bytes``; ``across_replicas``: not only along the axis that shards.

        Raises OrderMismatchError on every rank if another one is about to reduce a unit of another model, or begins another
        collective.
        """
        order, history = self.order, self.order.history
        if history.errors.has_raised:
            history.errors.go_on()
        try:
            order.take_turn(across_replicas)
        except OrderMismatchError:
            for agreed in history.agreed(across_replicas):
                agreed.begin_after_error()
            raise
        history.reduced.add(self.number)
        for agreed in history.agreed(across_replicas):
            order.agree(agreed, REDUCTION, num_bytes, self.number)


class CollectiveOrder:
    """The units of one model that communicate along ``axes``, and the order in which this rank has gathered and reduced them
    since the ranks last compared it.

    Gathers are compared between the ranks of a shard group, reductions between all data-parallel ranks: replicas may run
    different numbers of forwards. What several models have reduced along the same axes is one order; that their gathers meet
    is found before each (:class:`AgreedCollectives`), that their reductions do in the first backwards (:class:`RootTurn`).

    ===================  ==============================================================================================
    moment               comparison
    ===================  ==============================================================================================
    end of a backward    :meth:`send`: a heartbeat with what tells unused parameters, which has the same size on all
    that reduces         ranks, whatever they have run
    end of a forward     :meth:`compare_gathers`: a heartbeat of 16 bytes over the shard group, if there were gathers
    without gradients
    end of a backward    nothing; in the first of them as at the end of a forward
    that accumulates
    ===================  ==============================================================================================

    The ranks wait for the first heartbeats, and for no later ones: these are checked when the next one is sent.

    Attributes:
        number: of the first unit, which is that of no other order; model: the name of its class.
        trained: which parameters are trained, if that has changed since the units were enrolled.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self._axes = axes
        self._num_flags = self.number = 0
        self.model = self.trained = ""
        self.gathered = _Log()
        self._turns: tuple[RootTurn, ...] = ()
        self.history = _history(axes)
        self.shard_group, self.device = axes.shard_group, axes.device
        coordinate = axes.mesh.get_coordinate() or [0] * axes.mesh.ndim
        self._replica = 0
        for axis in axes.replicate:
            self._replica = self._replica * axes.mesh.size(axis) + coordinate[axis]

    def enroll(self, number: int, path: Callable[[], str], num_flags: int) -> OrderedUnit:
        """Add a unit with a :func:`next_unit_number` and ``num_flags`` parameters; in the same order on every rank.
        ``path``: its name."""
        unit = OrderedUnit(self, number, self._num_flags, path)
        history = self.history
        history.units[number] = unit
        self._num_flags += num_flags
        self.number = self.number or number
        history.message_bytes = max(history.message_bytes, self.header_bytes + self._num_flags)
        return unit

    def begin(self, model: str) -> None:
        """All data-parallel ranks have found out together that they run ``model``, whose units have been enrolled."""
        self.model = model
        self.history.reduced.clear()
        for agreed in self.history.agreed():
            agreed.begin_model(self.number)
        self.history.errors.open()
        for heartbeat in (self.history.heartbeat, self.history.gather_heartbeat):
            heartbeat.begin()
        if not self._turns:  # roots may share an order
            self._turns = tuple(RootTurn(each.watch.ranks, model, self.device) for each in self.history.agreed())

    def take_turn(self, across_replicas: bool) -> None:
        """See :meth:`OrderedUnit.reduces`."""
        if self._turns:
            self._turns[-1 if across_replicas else 0].take()

    def end_turn(self) -> None:
        """A backward has ended."""
        for turn in self._turns:
            turn.end()

    # At the end of a backward

    @property
    def header_bytes(self) -> int:
        """Of a message: what stands before the flags."""
        return _SLOT_BYTES * (1 + self._axes.num_replicas)

    def message(self, flags: Mapping[int, Sequence[int]]) -> bytearray:
        """Bytes of which the ranks take the maximum: a slot for reductions and the model, one for the gathers of each
        replica, and a byte for each parameter of all units. As long as that of any other model along these axes, whose
        message it would meet. ``flags``: those that are not 0, by their first place."""
        found = bytearray(self.history.message_bytes)
        trained = self.trained.encode()
        found[:_SLOT_BYTES] = _slot(_digest(self.history.reduced.digest() + trained, [self.number]))
        own = _SLOT_BYTES * (1 + self._replica)
        found[own : own + _SLOT_BYTES] = _slot(self.gathered.digest())
        for first, codes in flags.items():
            place = self.header_bytes + first
            found[place : place + len(codes)] = bytes(codes)
        return found

    def send(self, flags: Mapping[int, Sequence[int]], device: torch.device) -> Beat:
        """Begin anew, and send :meth:`message`.

        Raises OrderMismatchError on every rank if the ranks have gathered or reduced different units, in this step if it is
        one of the first, or in the one before; it names units and ranks.
        """
        message, history = self.message(flags), self.history
        for agreed in history.agreed():
            self.agree(agreed, END_OF_BACKWARD, len(message))
            agreed.begin(END_OF_BACKWARD)
        sent = self.gathered.taken(), history.reduced.taken()
        return history.heartbeat.send(message, device, lambda maximum: self._check(maximum, sent))

    def _check(self, maximum: Sequence[int], sent: tuple[_Log, _Log]) -> None:
        count = self.header_bytes // _SLOT_BYTES
        slots = [maximum[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] for slot in range(count)]
        different = [number for number, slot in enumerate(slots) if any(slot) and not _is_one(slot)]
        if different:
            self._raise(max(different) - 1, self._axes.data_parallel.group, sent)

    # At the end of a forward, and before and after a gather

    def compare_gathers(self, *, will_reduce: bool) -> None:
        """Compare the gathers since the last comparison with the other ranks of the shard group; where they ``will_reduce``,
        which compares these gathers, only in the first of such moments.

        Raises OrderMismatchError on each of them if they differ, as :meth:`send`.
        """
        group, history = self.shard_group, self.history
        if group.size() == 1 or not self.gathered.numbers:
            return
        compares = not will_reduce or history.gather_heartbeat.is_new
        if compares:
            self.agree(history.along, COMPARISON, _SLOT_BYTES)
        history.along.begin(GATHER if will_reduce else COMPARISON)
        if not compares:
            return
        message, sent = _slot(self.gathered.digest()), (self.gathered.taken(), _Log())

        def check(maximum: Sequence[int]) -> None:
            if not _is_one(maximum):
                self._raise(self._replica, group, sent)

        history.gather_heartbeat.send(message, self._axes.device, check)

    def agree(self, agreed: AgreedCollectives, kind: int, num_bytes: int, unit: int = 0) -> None:
        """Before each collective; see :class:`AgreedCollectives`."""
        if len(agreed.watch.ranks) > 1 and not agreed.agree((kind, self.number, num_bytes), unit, self.device):
            self.raise_difference(self.shard_group if agreed is self.history.along else self._axes.data_parallel.group)

    def raise_difference(self, group: dist.ProcessGroup) -> NoReturn:
        """Called by all ranks of the ``group``, which have begun, or are about to begin, different collectives."""
        replica = self._replica if group is self.shard_group else -1
        self._raise(replica, group, (self.gathered, self.history.reduced))

    def _raise(self, replica: int, group: dist.ProcessGroup, logs: tuple[_Log, _Log]) -> NoReturn:
        """``replica``: whose gathers differ, or else reductions; -1: reductions do. ``logs``: of gathers and reductions."""
        consensus = Round(dist.get_process_group_ranks(group), f"order of units along {group.group_name}")
        entries = [] if replica < 0 else logs[0].entries("gather")
        entries += [*logs[1].entries("reduction"), ("the model that runs", self.number)]
        own = [(place, *self.history.name_of(number)) for place, number in entries]
        own.append((_TRAINED, self.trained or "as before", ""))
        found: dict[int, list[tuple[str, str, str]]] = {}
        for rank, message in zip(
            consensus.ranks,
            consensus.exchange(json.dumps([self._replica, own]).encode(), lambda: "comparing the order of units"),
        ):
            of, rows = json.loads(message)
            if replica in (-1, of):
                found[rank] = rows
        log_of = _named(found)
        self.gathered.clear()
        self.history.reduced.clear()
        for agreed in self.history.agreed(group is not self.shard_group):
            agreed.begin_after_error()
        for heartbeat in (self.history.heartbeat, self.history.gather_heartbeat):
            heartbeat.begin_anew()
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may exit after this: let all have read
            consensus.exchange(b"read", lambda: "leaving the comparison of the order of units")
        error = _error(log_of)
        if group is self.shard_group:
            self.history.errors.tell(error)
        raise error


def _error(log_of: Mapping[int, Entries]) -> OrderMismatchError:
    """Of ranks with these logs."""
    if len({tuple(entries) for entries in log_of.values()}) == 1:
        return OrderMismatchError(
            f"ranks {sorted(log_of)} are in different gathers, although they have gathered the same units since their "
            "last comparison: an error has ended a forward or backward early on some of them. If one rank raises, "
            "end the program on every rank"
        )
    difference = first_difference("units since the last comparison", log_of)
    if difference.name == _TRAINED:
        return OrderMismatchError(
            f"ranks have frozen different parameters: {difference.text().partition(' is ')[2]}; a gradient would be the sum "
            "of those of some ranks. Set requires_grad in the same way on every rank",
            difference.ranks,
        )
    return different_modules(difference.text(), difference.ranks)


def _named(found: Mapping[int, Sequence[tuple[str, str, str]]]) -> dict[int, Entries]:
    """Each place with the path of its unit, or the longer name where units have one path. Of each rank."""
    longer: dict[str, set[str]] = {}
    for rows in found.values():
        for _, path, name in rows:
            longer.setdefault(path, set()).add(name)
    return {
        rank: [(place, path if len(longer[path]) == 1 else name) for place, path, name in rows]
        for rank, rows in found.items()
    }


def _digest(earlier: bytes, numbers: Sequence[int]) -> bytes:
    return hashlib.blake2b(earlier + array("I", numbers).tobytes(), digest_size=_DIGEST_BYTES).digest()


def _slot(digest: bytes) -> bytearray:
    return bytearray(digest) + bytearray(255 - byte for byte in digest)


def _is_one(maximum: Sequence[int]) -> bool:
    """Whether all ranks have put the same digest in a slot."""
    return all(a + b == 255 for a, b in zip(maximum[:_DIGEST_BYTES], maximum[_DIGEST_BYTES:], strict=True))
