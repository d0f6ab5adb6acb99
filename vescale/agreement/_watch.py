"""``Watch``: ranks that wait for each other in collectives that do not pair, or before different events of a step, learn it
while they wait; on any number of hosts.

Each rank notes what it begins, which asks and tells nobody. One that has waited for a second posts what it has begun last,
and where it waits, in the job's store, and again with each look: every second at first, every three seconds later. The first
of them reads what all have posted, and writes what it has found, which the others read. So a wait costs each rank two or
three small requests a second, and one of them one for each other; without long waits nothing is asked.

On a device the host does not wait in a collective, but later, in any call. So another thread looks when the main thread has
been in one call for a second, and the device has not ended what it was given. It may compute, so that its rank counts as one
that waits only where it has begun another collective than the others.

What has begun cannot be taken back. So all raise, and their processes end: when they exit, or 10 s later, whatever they wait
for.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from vescale.agreement._round import Round, add_row, connection, peek, rows_of
from vescale.comm import DEVICE, DeviceWait, look, look_while_waiting, waiting_thread
from vescale.compat import is_alone, note

Entry = tuple[int, int, Any]
"""Of a collective, its kind and bytes, and for whom it is; of an event, numbers that tell what it is, and a text. The first
two are the same on all ranks if they pair."""

_KEPT = 64  # entries
_STEADY_LOOKS, _EVERY = 8, 3  # after so many looks at one place, a rank posts in every third one
_GRACE_SECONDS = 2.0  # that the next post of a rank that still waits may be late
# How long ranks have been seen apart: if all of them wait where they look, and if some do not, or only sizes of gathers
# differ. They may be about to tell the others that they do.
_SEEN_SECONDS, _DOUBT_SECONDS, _ALL_FOUND_SECONDS, _SECONDS_TO_END = 1.5, 10.0, 8.0, 10
_SEEN_IN_EVENTS = 4.0  # collectives say more, and come first
_APART: list[Exception] = []  # that end this process


@dataclass(frozen=True)
class Apart:
    """Ranks that will not meet: ``entries`` of those that have begun what others have not, or something else; ``texts`` of
    those that wait before it, about where they do."""

    entries: dict[int, Entry]
    texts: dict[int, str]


class _Row(NamedTuple):
    """What a rank has posted: the number of the post, and in how many seconds the next one comes; how many entries there
    are, and the latest; for whom it waits (None: in a collective), and where."""

    post: int
    pause: float
    number: int
    entries: list[Entry]
    awaited: list[int] | None
    what: str

    def entry(self, number: int) -> Entry | None:
        place = number - self.number - 1
        if not -len(self.entries) <= place < 0:
            return None
        kind, num_bytes, unit = self.entries[place]
        return kind, num_bytes, unit


class Watch:
    """Of ``ranks``.

    Args:
        name: of rounds that only they have.
        error: what all of them raise.
        ended: what is raised by a rank whose wait has failed, of how the programs of others have ended, by rank, as far as
            they have told it. It is given for events, to all of which every rank comes; None: for collectives.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        name: str,
        error: Callable[[Apart], Exception],
        ended: Callable[[Mapping[int, str]], Exception | None] | None = None,
    ) -> None:
        self.ranks, self._name, self._error, self._ended = tuple(ranks), name, error, ended
        self.looks_last = ended is not None  # others may know more
        self._place = ""
        self._entries: deque[Entry] = deque(maxlen=_KEPT)
        self._number = self._turn = self._post = 0
        self._at: object = None
        self._num_looks = 0
        self._leader: tuple[str, float] = ("", 0.0)
        self._rows: dict[int, tuple[_Row, float]] = {}  # of others, and when each was seen first
        self._seen: tuple[Apart | None, float] = (None, 0.0)
        self._counted: set[int] = set()  # turns in which this rank has found a difference

    def open(self) -> None:
        """All ranks call it together. No communication."""
        if not self._place and len(self.ranks) > 1 and not is_alone():
            self._place = Round(self.ranks, self._name).place
            look_while_waiting(self)
            if self._ended is not None:
                world = dist.group.WORLD
                assert world is not None  # ranks agree
                _OPEN[self] = weakref.ref(world)
                _tell_of_ends()
            _look_for_waiting_threads().see_device()  # the first model may have been on the CPU

    def begin(self, kind: int, num_bytes: int, unit: Any) -> None:
        """Before each collective or event, with its entry. After an error that ends the process soon, it raises the same
        again: messages would meet those of other collectives."""
        if _APART:
            raise _APART[0]
        self._number += 1
        self._entries.append((kind, num_bytes, unit))

    def begin_anew(self) -> None:
        """All ranks have found a difference by other means, and go on."""
        if not _APART:
            self._turn += 1
            self._number, self._seen = 0, (None, 0.0)
            self._entries.clear()
            self._rows.clear()

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        """See :class:`vescale.comm.Look`. Raises on every rank that waits, if the collectives that they have begun under one
        number do not pair; or if ranks wait in a collective that others have not begun, and these wait for them, while no
        rank does anything else."""
        if in_vain and self._place and self._ended is not None:
            ended = self._ended(self._ends())
            if ended is not None:
                raise ended
        if self._place and (found := self._apart(awaited, what, in_vain)) is not None:
            error = self._error(found)
            # First: the thread that waits may fail meanwhile, because another rank has ended.
            _note_end(error, tells=threading.current_thread() in _LOOKING)
            self._wait_until_all_have_found_it()
            end_soon(error)
            raise error

    def _apart(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> Apart | None:
        at = self._number, awaited
        self._num_looks = 0 if at != self._at else self._num_looks + 1
        self._at = at
        is_steady = self._num_looks >= _STEADY_LOOKS
        if is_steady and self._num_looks % _EVERY and not in_vain:
            return None
        self._post += 1
        pause = float(_EVERY if is_steady else 1)
        waits_for = None if awaited is None else list(awaited)
        row = _Row(self._post, pause, self._number, list(self._entries), waits_for, what)
        place, index = f"{self._place} turn {self._turn}", self.ranks.index(dist.get_rank())
        with connection() as store:
            if (told := peek(store, f"{place} found")) is not None:
                entries, texts = ({int(rank): each for rank, each in found.items()} for found in json.loads(told))
                return Apart({rank: tuple(entry) for rank, entry in entries.items()}, texts)
            store.set(f"{place} row {index}", json.dumps(row))
            if not self._leads(store, place, f"{index} {self._post}", pause):
                return None
            for other in range(len(self.ranks)):
                if other != index and (text := peek(store, f"{place} row {other}")) is not None:
                    posted = _Row(*json.loads(text))
                    if other not in self._rows or self._rows[other][0].post != posted.post:
                        self._rows[other] = posted, time.monotonic()
            found = self._found({**self._rows, index: (row, time.monotonic())})
            if found is not None:
                store.set(f"{place} found", json.dumps([found.entries, found.texts]))
            return found

    def _leads(self, store: dist.Store, place: str, own: str, pause: float) -> bool:
        """Whether this rank reads what all have posted: the first, or the first after that no longer looks."""
        key, now = f"{place} leader", time.monotonic()
        leader = store.compare_set(key, "", own).decode()
        if leader.split()[0] == own.split()[0]:
            store.set(key, own)
            return True
        if leader != self._leader[0]:
            self._leader = leader, now
        elif now - self._leader[1] > pause + _GRACE_SECONDS:
            return bool(store.compare_set(key, leader, own).decode() == own)
        return False

    def _found(self, rows: dict[int, tuple[_Row, float]]) -> Apart | None:
        """Of the rows of all ranks, by position, and when they were seen. They have to be seen apart for a while, because
        they may be about to raise by themselves."""
        found, now, are_gathers, seconds = None, time.monotonic(), False, _SEEN_SECONDS
        if len(rows) == len(self.ranks):
            every = [rows[index][0] for index in range(len(self.ranks))]
            least = min(row.number for row in every)
            begun = [[row.entry(number) for row in every] for number in range(max(least - _KEPT, 0) + 1, least + 1)]
            begun = [entries for entries in begun if None not in entries]
            apart = next((each for each in begun if len({entry[:2] for entry in each if entry}) > 1), None)
            if apart is not None:
                are_gathers = not any(entry[0] for entry in apart if entry)  # the first kind; sizes differ
                first = next(entries for entries in begun if len(set(entries)) > 1)
                found = Apart({rank: entry for rank, entry in zip(self.ranks, first) if entry}, {})
            wait = all(now - since < row.pause + _GRACE_SECONDS for row, since in rows.values())
            if found is None and wait:
                found = self._stuck(every, least)
                seconds = _SEEN_SECONDS if self._ended is None else _SEEN_IN_EVENTS
        if found is None or found != self._seen[0]:
            self._seen = found, now
        since = self._seen[1]
        is_certain = not are_gathers and all(at >= since for _, at in rows.values())
        return found if now - since >= (seconds if is_certain else _DOUBT_SECONDS) else None

    def _stuck(self, rows: Sequence[_Row], least: int) -> Apart | None:
        """Of ranks that all wait. One that waits for its device may begin what the others have begun."""
        if any(row.what == DEVICE for row in rows):
            return None
        ahead = [rank for rank, row in zip(self.ranks, rows) if row.number > least]
        behind = {rank: row for rank, row in zip(self.ranks, rows) if row.number == least}
        if self._ended is not None:  # events, of which each rank comes to all
            begun = {rank: row.entry(least + (rank in ahead)) for rank, row in zip(self.ranks, rows)}
            texts = {rank: f"in {row.what}" for rank, row in behind.items()}
            texts |= {rank: f"{text} after {last[2]}" for rank, text in texts.items() if (last := begun[rank])}
            return Apart({rank: entry for rank in ahead if (entry := begun[rank])}, texts) if ahead else None
        for_those = all(row.awaited is not None and set(ahead) <= set(row.awaited) for row in behind.values())
        entries = {rank: row.entry(least + 1) for rank, row in zip(self.ranks, rows) if rank in ahead}
        in_collectives = all(row.awaited is None for row in rows if row.number > least)
        if not ahead or not for_those or not in_collectives or None in entries.values():
            return None
        return Apart(
            {rank: entry for rank, entry in entries.items() if entry}, {r: row.what for r, row in behind.items()}
        )

    def tell_end(self, how: str) -> None:
        """This rank's program has ended."""
        with suppress(RuntimeError), connection() as store:  # the rank that holds the store may have ended
            add_row(store, f"{self._place} ended", self.ranks.index(dist.get_rank()), how)

    def _ends(self) -> dict[int, str]:
        with suppress(RuntimeError), connection() as store:  # the rank that holds the store may have ended
            rows = rows_of(store, f"{self._place} ended", len(self.ranks)) or ()
            return {self.ranks[index]: how for index, how in rows}
        return {}

    def _wait_until_all_have_found_it(self) -> None:
        """A rank whose process ends would break the connections of the others. Not for long."""
        key, end = f"{self._place} turn {self._turn} have found it", time.monotonic() + _ALL_FOUND_SECONDS
        own = int(self._turn not in self._counted)  # two threads of a rank may find it
        self._counted.add(self._turn)
        with connection() as store, suppress(RuntimeError):  # the rank that holds the store has ended
            found = store.add(key, own)
            while found < len(self.ranks) and time.monotonic() < end:
                time.sleep(0.1)
                found = store.add(key, 0)
            time.sleep(0.5)  # the last one is printing it


# Those whose ranks tell that their programs have ended, with their default group.
_OPEN: weakref.WeakKeyDictionary[Watch, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


@functools.cache
def _tell_of_ends() -> None:
    note("agreement._watch:process", "atexit")

    def tell() -> None:
        error = getattr(sys, "last_value", None)
        how = "normally" if error is None else f"with {type(error).__name__}: {error}".partition("\n")[0]
        for watch, world in list(_OPEN.items()):
            if dist.is_initialized() and world() is dist.group.WORLD:
                watch.tell_end(how)

    atexit.register(tell)


def end_soon(error: Exception) -> None:
    """This process, which raises an error, waits in a collective that never ends."""
    _note_end(error, tells=False)
    with suppress(OSError, AttributeError, ValueError):  # no stderr of a process
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True)


def _note_end(error: Exception, *, tells: bool) -> None:
    _prepare()
    if error not in _APART:
        _APART.append(error)
        if tells:
            _tell(f"{type(error).__name__}: {error}\n")


def end_for(error: Exception, thread: int) -> None:
    """End this process in the place of a thread that waits and cannot raise ``error``: it is printed with the thread's
    stack."""
    _note_end(error, tells=True)
    _tell("".join(traceback.format_stack(sys._current_frames().get(thread))))
    _end_if_apart()


def _tell(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)


_LOOKING: list[threading.Thread] = []


@functools.cache
def _look_for_waiting_threads() -> DeviceWait:
    """In the place of threads that wait for messages, and of this one while it waits for its device, which cannot look, nor
    raise: the process ends."""
    device = DeviceWait()

    def run() -> None:
        while True:
            time.sleep(0.5)
            thread, what = waiting_thread(), "a collective"
            if thread is None and device.is_long():
                thread, what = device.thread, DEVICE
            if thread is None:
                continue
            try:
                with contextlib.suppress(dist.DistError):  # the store is gone
                    look(None, what)
            except Exception as error:
                end_for(error, thread)

    _LOOKING.append(threading.Thread(target=run, daemon=True, name="vescale watch"))
    _LOOKING[-1].start()
    return device


@functools.cache
def _prepare() -> None:
    note("agreement._watch:process", "atexit", "faulthandler")
    atexit.register(_end_if_apart)


def _end_if_apart() -> None:
    """A process group of gloo would wait at its end for collectives that never end, until its timeout."""
    if _APART:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
