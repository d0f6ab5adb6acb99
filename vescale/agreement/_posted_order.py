"""``PostedOrder``: which collectives each rank of a host has begun, in memory that all of them map.

Nobody waits for anybody.

Each rank has a row, which it alone writes: how many entries it has posted, where it waits, and its latest entries in a ring.
An entry has its number, so that a reader knows whether it is the one that it looks for. The number is written last, so
that an entry with a number is complete.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale import csrc
from vescale.agreement._round import Round
from vescale.agreement._store import connection, peek
from vescale.comm import LONG_WAIT_SECONDS, Operation, look, tell_wait
from vescale.compat import is_alone
from vescale.errors import RankGoneError

# ``Board``: what each rank of a host is about to do, in memory that all of them map; to compare it takes microseconds.
# Each rank has a row, which it alone writes. What it posts has a number, the same on every rank, and consists of marks
# of 64 bits: 16 bits of the number and 48 of a digest, so that a mark tells by itself whether it is the one that is
# waited for. The two latest posts of a rank are kept. A rank posts number n + 2 when all have read number n, because it
# has seen their posts of number n + 1. A board has channels, each with numbers of its own, on which parts of the ranks
# meet. A rank that waits for long writes where, so that ranks that wait for each other on different channels find out.

NUM_MARKS = 3
_MARKS_OF_A_POST = struct.Struct(f"{NUM_MARKS}Q")
# A row: the process, the start of the process, where it waits, the text; then 2 * NUM_MARKS marks for each channel.
_PROCESS, _WAITS, _TEXT_AT, _MARKS = 0, 2, 24, 32
_TEXT_BYTES = 8 * _MARKS - _TEXT_AT - 1
_DIGEST_BITS = 48
_DIGEST = (1 << _DIGEST_BITS) - 1
# Ranks that share a core let each other run at once; after so many looks they sleep: a sixteenth of the time that they have
# waited, within these limits.
_LOOKS = 50
_SHORT_SLEEP, _LONG_SLEEP = 0.0002, 0.002
_LIVENESS_SECONDS = 0.25


class CrossWaitError(RuntimeError):
    """Ranks wait for each other on different channels; ``ranks``: which."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"ranks {list(ranks)} wait for each other")
        self.ranks = tuple(ranks)


Channels = Sequence[Sequence[Sequence[int]]]
"""For each channel, for each position among the ranks, the positions of those that it meets, itself among them."""


class Board:
    """Made by all ``ranks`` together.

    ``Board.open`` returns None, on every rank, where they are not all on one host.

    Attributes:
        row: of this rank, in C++; None without it.
    """

    def __init__(self, ranks: Sequence[int], own: int, memory: mmap.mmap | bytearray, channels: Channels) -> None:
        self.ranks, self._own, self._memory, self._channels = tuple(ranks), own, memory, channels
        self._bytes = memoryview(memory)
        self._cells = self._bytes.cast("Q")
        self._width = _row_cells(channels)
        base = own * self._width
        self._cells[base + _PROCESS] = os.getpid()
        self._cells[base + _PROCESS + 1] = _started(os.getpid())
        # Of each channel, where the marks of the ranks begin that this one meets.
        self._places = [
            [index * self._width + _MARKS + channel * 2 * NUM_MARKS for index in peers[own]]
            for channel, peers in enumerate(channels)
        ]
        native = csrc.step_marks()
        places = (memory, base, self._places, _MARKS, _TEXT_AT, _TEXT_BYTES)
        self.row: Any = None if native is None else native.BoardRow(*places)

    @classmethod
    def open(cls, ranks: Sequence[int], name: str, channels: Channels = ()) -> Board | None:
        """Rounds to which all ranks come; ``name``: of these. Without ``channels`` there is one, of all ranks."""
        own = list(ranks).index(dist.get_rank())
        if len(ranks) == 1 or is_alone():
            alone = [[(0,)]] * max(len(channels), 1)
            return cls(ranks[own : own + 1], 0, bytearray(8 * _row_cells(alone)), alone)
        channels = channels or [[range(len(ranks))] * len(ranks)]
        memory = shared_memory(ranks, name, len(ranks) * 8 * _row_cells(channels))
        return None if memory is None else cls(ranks, own, memory, channels)

    def post(self, number: int, digests: tuple[int, int, int], text: str, channel: int = 0) -> bool:
        """Write this rank's marks, one for each digest, and a text about them. Whether every rank of the channel has posted
        the same marks by now."""
        if self.row is not None:
            return bool(self.row.post(number, channel, *digests, text))
        low = (number & 0xFFFF) << _DIGEST_BITS
        marks = tuple([low | (digest & _DIGEST) for digest in digests])
        base = self._own * self._width
        line = text.encode()[:_TEXT_BYTES]
        at = 8 * base + _TEXT_AT
        self._bytes[at : at + len(line) + 1] = line + b"\0"
        _MARKS_OF_A_POST.pack_into(self._bytes, 8 * (base + _MARKS + (2 * channel + (number & 1)) * NUM_MARKS), *marks)
        offset = (number & 1) * NUM_MARKS
        for place in self._places[channel]:
            if _MARKS_OF_A_POST.unpack_from(self._bytes, 8 * (place + offset)) != marks:
                return False
        return True

    def rows(self, number: int, channel: int = 0) -> list[list[int]] | None:
        """The marks of this number of every rank of a channel; None: some have not posted it."""
        wanted, offset, found = number & 0xFFFF, (number & 1) * NUM_MARKS, []
        for place in self._places[channel]:
            start = place + offset
            marks = self._cells[start : start + NUM_MARKS].tolist()
            for mark in marks:
                if mark >> _DIGEST_BITS != wanted:
                    return None
            found.append(marks)
        return found

    def wait(self, number: int, limit: float, what: str, channel: int = 0) -> list[list[int]]:
        """:meth:`rows`, when all have posted. A hang report is told of a long wait, as ``what``.

        Raises RankGoneError if the process of a rank that has not posted ends; CrossWaitError if ranks wait for each other,
        after which this rank has to leave the board: where it waited stays, for those that wait for it and come later;
        TimeoutError after ``limit`` seconds (twice that under a hang report, which names the ranks and where they are), of
        which those do not count in which ranks are stopped at a breakpoint; and what :func:`look` raises.
        """
        for _ in range(_LOOKS):
            found = self.rows(number, channel)
            if found is not None:
                return found
            os.sched_yield()
        told: Operation | None = None
        waits = self._own * self._width + _WAITS
        crossed: object = None
        stays = False
        try:
            begin = looked = now = time.monotonic()
            while True:
                found = self.rows(number, channel)
                if found is not None:
                    return found
                time.sleep(min(max(_SHORT_SLEEP, (now - begin) / 16), _LONG_SLEEP))
                now = time.monotonic()
                if now - looked > _LIVENESS_SECONDS:
                    self._cells[waits] = (channel + 1) << 16 | (number & 0xFFFF)
                    ranks = self.ranks_of(channel)
                    if told is None and (told := tell_wait(what, number, f"steps of {ranks}", ranks)) is not None:
                        limit *= 2
                    looked = now
                    before, crossed = crossed, self._crossed_waits()
                    if crossed and crossed == before and self.rows(number, channel) is None:
                        stays = True
                        raise CrossWaitError([self.ranks[index] for index, *_ in crossed])
                    gone = [index for index in self.absent(number, channel) if self._has_ended(index)]
                    if gone and self.rows(number, channel) is None:
                        look([self.ranks[index] for index in gone], what, in_vain=True)
                        raise RankGoneError(self.ranks[gone[0]])
                    if now - begin > LONG_WAIT_SECONDS:
                        look([self.ranks[index] for index in self.absent(number, channel)], what)
                    if now - begin > limit:
                        if not _is_paused():
                            raise TimeoutError
                        begin = now
        finally:
            if not stays:
                self._cells[waits] = 0
            if told is not None:
                told.ended = time.time()

    def ranks_of(self, channel: int) -> tuple[int, ...]:
        """The ranks that this one meets."""
        return tuple(self.ranks[index] for index in self._channels[channel][self._own])

    def absent(self, number: int, channel: int = 0) -> list[int]:
        """Positions of the ranks that have not posted this number."""
        return self._absent(self._own, number & 0xFFFF, channel)

    def _absent(self, waiting: int, number: int, channel: int) -> list[int]:
        offset = _MARKS + (2 * channel + (number & 1)) * NUM_MARKS
        peers = self._channels[channel][waiting]
        return [i for i in peers if self._cells[i * self._width + offset] >> _DIGEST_BITS != number]

    def _crossed_waits(self) -> list[tuple[int, int, list[int]]]:
        """Of the ranks that this one waits for, directly or not, those that wait for each other: position, where it waits,
        and for whom. Empty: at least one of them does not wait here."""
        waits: dict[int, tuple[int, list[int]]] = {}
        visited = [self._own]
        for index in visited:
            cell = self._cells[index * self._width + _WAITS]
            if cell and (awaited := self._absent(index, cell & 0xFFFF, (cell >> 16) - 1)):
                waits[index] = cell, awaited
                visited += [other for other in awaited if other not in visited]
        while ended := [i for i, (_, awaited) in waits.items() if not any(other in waits for other in awaited)]:
            for index in ended:
                del waits[index]
        return [(index, *found) for index, found in sorted(waits.items())]

    def text(self, index: int) -> str:
        """What a rank has posted last."""
        at = 8 * index * self._width + _TEXT_AT
        return bytes(self._bytes[at : at + _TEXT_BYTES]).split(b"\0")[0].decode(errors="replace")

    def _has_ended(self, index: int) -> bool:
        row = index * self._width + _PROCESS
        process, start = self._cells[row], self._cells[row + 1]
        return process != 0 and start != 0 and _started(process) != start


def shared_memory(ranks: Sequence[int], name: str, size: int) -> mmap.mmap | None:
    """Bytes that all ``ranks`` map, 0 at first; None, on every rank, where they are not all on one host. Two rounds, to
    which all ranks come; ``name``: of these."""
    rounds = Round(ranks, name)
    about = f"opening shared memory for {name}"
    found = rounds.lead(_host, lambda hosts: str(_new_file(size)) if len(set(hosts)) == 1 else "", lambda: about)
    if not found:
        return None
    path, memory = Path(found), None
    with contextlib.suppress(OSError), path.open("r+b") as file:  # else: hosts with one name and folders of their own
        memory = mmap.mmap(file.fileno(), size)
    have_all = all(found == b"mapped" for found in rounds.exchange(b"mapped" if memory else b"", lambda: about))
    if rounds.index == 0:
        path.unlink(missing_ok=True)
    return memory if have_all else None


def _row_cells(channels: Channels) -> int:
    return _MARKS + 2 * NUM_MARKS * len(channels)


def _is_paused() -> bool:
    """Whether ranks are stopped at a breakpoint."""
    with contextlib.suppress(RuntimeError), connection() as store:
        return bool(store.add("vescale paused", 0))
    return False


def _host() -> str:
    if name := os.environ.get("VESCALE_HOST", ""):  # tests give ranks of one machine hosts of their own
        return name
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    return socket.gethostname()


def _new_file(size: int) -> Path:
    shared = Path("/dev/shm")
    number, path = tempfile.mkstemp(prefix="vescale-", dir=shared if os.access(shared, os.W_OK) else None)
    try:
        os.truncate(number, size)
    finally:
        os.close(number)
    return Path(path)


def _started(process: int) -> int:
    """When a process began, in the kernel's ticks; 0: there is none, or it has ended (or the system does not tell)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


Entry = tuple[int, int, int]

_ENTRY, _BEGINNING, _CONTENT = struct.Struct("4Q"), struct.Struct("3Q"), struct.Struct("3Q")
_RING = 64
# A row: the number of the last entry; when the rank has waited last, in nanoseconds, and how; whether it has found a
# difference; a text about its wait; the ring.
_NUMBER, _WAIT, _FOUND = struct.Struct("Q"), struct.Struct("2Q"), struct.Struct("Q")
_WAIT_AT, _FOUND_AT, _POSTED_ORDER_TEXT_AT, _POSTED_ORDER_TEXT_BYTES, _RING_AT = 8, 24, 32, 96, 128
_ROW_BYTES = _RING_AT + _ENTRY.size * _RING
_IN_A_COLLECTIVE, _FOR_OTHERS, _ELSEWHERE = 1, 2, 3
# Of a number: above this bit, how often ranks have begun anew.
_TURN = 32
# How long ago the last look of a rank is that still waits; how long ranks have been seen apart, if all of them wait where
# they look, and if some do not, or if only sizes of gathers differ: ranks may be about to tell the others that they do.
_RECENT_SECONDS, _SEEN_SECONDS, _DOUBT_SECONDS, _ALL_FOUND_SECONDS = 3.0, 1.5, 10.0, 6.0


@dataclass(frozen=True)
class Apart:
    """Ranks that will not meet: ``entries`` of those that have begun what others have not, or something else; ``texts`` of
    those that wait before it, about where they do."""

    entries: dict[int, Entry]
    texts: dict[int, str]

    @property
    def are_all_gathers(self) -> bool:
        """Whether every rank has begun a gather, the first kind; their sizes differ."""
        return not self.texts and not any(kind for kind, _, _ in self.entries.values())


class PostedOrder:
    """Made by ``PostedOrder.open``, which all ``ranks`` call together.

    Args:
        memory: a row of each rank, which all of them map; or which is this rank's alone, and the ``hosts`` exchange rows
            while they wait.
    """

    def __init__(self, ranks: Sequence[int], memory: memoryview, hosts: RowsOfHosts | None = None) -> None:
        self.ranks = tuple(ranks)
        self._memory, self._hosts = memory, hosts
        self._base = self.ranks.index(dist.get_rank()) * _ROW_BYTES
        self._number = 0
        self._seen: tuple[Apart | None, float] = (None, 0.0)

    @classmethod
    def open(cls, ranks: Sequence[int], name: str) -> PostedOrder | None:
        """None, on every rank: they do not communicate by gloo. ``name``: of the rounds in which they meet."""
        if len(ranks) == 1 or is_alone() or dist.get_backend() != "gloo":
            return None
        size = len(ranks) * _ROW_BYTES
        memory = shared_memory(ranks, name, size)
        if memory is not None:
            return cls(ranks, memoryview(memory))
        return cls(
            ranks, memoryview(bytearray(size)), RowsOfHosts(name, list(ranks).index(dist.get_rank()), len(ranks))
        )

    def post(self, kind: int, num_bytes: int, unit: int) -> bool:
        """``kind`` and ``num_bytes`` are the same on all ranks if their collectives pair; ``unit``: for whom they are.

        False: a rank has begun another kind of collective, or one of another size (but for the first kind, whose sizes are
        agreed on). This one must not follow: gloo ends the process when messages of other sizes meet.
        """
        number = self._number = self._number + 1
        place = self._place(self._base, number)
        _CONTENT.pack_into(self._memory, place + _NUMBER.size, kind, num_bytes, unit)
        _NUMBER.pack_into(self._memory, place, number)
        _NUMBER.pack_into(self._memory, self._base, number)
        if self._hosts is not None:
            return True
        own = number, kind, num_bytes
        # Processors with weak memory ordering may make the number visible before the rest of the entry. Read it again.
        return all(self._pairs(base, *own) or self._pairs(base, *own) for base in self._bases())

    def _pairs(self, base: int, number: int, kind: int, num_bytes: int) -> bool:
        other, other_kind, other_bytes = _BEGINNING.unpack_from(self._memory, self._place(base, number))
        return other != number or (other_kind == kind and (not kind or other_bytes == num_bytes))

    def begin_anew(self) -> None:
        """Called by all ranks, which have found a difference by other means, and go on."""
        self._number = ((self._number >> _TURN) + 1) << _TURN
        _NUMBER.pack_into(self._memory, self._base, self._number)

    def apart(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> Apart | None:
        """Of ranks that wait for each other in vain; see :meth:`Look.look`. None: they may still meet.

        They do not, if the collectives that they have begun under one number do not pair. Nor if ranks wait in a
        collective that others have not begun, and these wait for them, while no rank does anything else. They have to be
        seen so for a while, because ranks may be about to raise by themselves.
        """
        numbers = [_NUMBER.unpack_from(self._memory, base)[0] for base in self._bases()]
        self._note_wait(awaited, what, numbers)
        if self._hosts is not None:
            return self._apart_on_hosts(self._hosts, awaited, in_vain)
        return self._found(numbers)

    def _apart_on_hosts(self, hosts: RowsOfHosts, awaited: Sequence[int] | None, in_vain: bool) -> Apart | None:
        """One of the ranks that wait reads what all of them have posted, and writes what it has found."""
        row = bytes(self._memory[self._base : self._base + _ROW_BYTES])
        turn = self._number >> _TURN
        if not hosts.is_due((self._number, awaited)) and not in_vain:
            return None
        told = hosts.told(turn)
        if told is not None:
            entries, texts = ({int(rank): found for rank, found in each.items()} for each in told)
            return Apart({rank: tuple(entry) for rank, entry in entries.items()}, texts)
        if not hosts.post(turn, row, awaited):
            return None
        others = hosts.rows(turn)
        for index, (row, _, _) in others.items():
            self._memory[index * _ROW_BYTES : (index + 1) * _ROW_BYTES] = row
        numbers = [_NUMBER.unpack_from(self._memory, base)[0] for base in self._bases()]
        for index, (_, waits_for, since) in others.items():
            ahead = {rank for rank, number in zip(self.ranks, numbers) if number > numbers[index]}
            how = _IN_A_COLLECTIVE if waits_for is None else _FOR_OTHERS if ahead <= set(waits_for) else _ELSEWHERE
            _WAIT.pack_into(self._memory, index * _ROW_BYTES + _WAIT_AT, int(since * 1e9), how)
        found = self._found(numbers)
        if found is not None:
            hosts.tell(turn, found)
        return found

    def _found(self, numbers: Sequence[int]) -> Apart | None:
        first = max((max(numbers) >> _TURN << _TURN) + 1, max(numbers) - _RING + 2)
        rows = [each for number in range(first, min(numbers) + 1) if (each := self._entries(number)) is not None]
        found = None
        if any(len({entry[:2] for entry in entries}) > 1 for entries in rows):
            found = Apart(dict(zip(self.ranks, next(entries for entries in rows if len(set(entries)) > 1))), {})
        found = found or self._stuck_ranks(numbers)
        now = time.monotonic()
        if found is None or found != self._seen[0]:
            self._seen = found, now
        since = self._seen[1]
        all_wait = all(_WAIT.unpack_from(self._memory, base + _WAIT_AT)[0] / 1e9 >= since for base in self._bases())
        is_certain = all_wait and found is not None and not found.are_all_gathers
        return found if now - since >= (_SEEN_SECONDS if is_certain else _DOUBT_SECONDS) else None

    def wait_until_all_have_found_it(self) -> None:
        """A rank whose process ends would break the connections of the others. Not for long."""
        end = time.monotonic() + _ALL_FOUND_SECONDS
        if self._hosts is not None:
            self._hosts.wait_until_all_have_found_it(self._number >> _TURN, end)
            return
        _FOUND.pack_into(self._memory, self._base + _FOUND_AT, 1)
        while time.monotonic() < end:
            if all(_FOUND.unpack_from(self._memory, base + _FOUND_AT)[0] for base in self._bases()):
                return
            time.sleep(0.01)

    def _note_wait(self, awaited: Sequence[int] | None, what: str, numbers: Sequence[int]) -> None:
        own, how = numbers[self._base // _ROW_BYTES], _IN_A_COLLECTIVE
        if awaited is not None:
            ahead = {rank for rank, number in zip(self.ranks, numbers) if number > own}
            how = _FOR_OTHERS if ahead <= set(awaited) else _ELSEWHERE
        line = what.encode()[: _POSTED_ORDER_TEXT_BYTES - 1]
        at = self._base + _POSTED_ORDER_TEXT_AT
        self._memory[at : at + len(line) + 1] = line + b"\0"
        _WAIT.pack_into(self._memory, self._base + _WAIT_AT, time.monotonic_ns(), how)

    def _stuck_ranks(self, numbers: Sequence[int]) -> Apart | None:
        now = time.monotonic()
        waits = [_WAIT.unpack_from(self._memory, base + _WAIT_AT) for base in self._bases()]
        hows = [how if now - began / 1e9 < _RECENT_SECONDS else 0 for began, how in waits]
        least, most = min(numbers), max(numbers)
        is_stuck = least >> _TURN == most >> _TURN and all(
            how == (_FOR_OTHERS if number == least else _IN_A_COLLECTIVE) for how, number in zip(hows, numbers)
        )
        if least == most or not is_stuck:
            return None
        begun = {rank: base for rank, base, n in zip(self.ranks, self._bases(), numbers) if n > least}
        next_one = {
            rank: _ENTRY.unpack_from(self._memory, self._place(base, least + 1)) for rank, base in begun.items()
        }
        if any(entry[0] != least + 1 for entry in next_one.values()):
            return None
        texts = {rank: self._text(base) for rank, base, n in zip(self.ranks, self._bases(), numbers) if n == least}
        return Apart({rank: entry[1:] for rank, entry in next_one.items()}, texts)

    def _bases(self) -> range:
        return range(0, len(self.ranks) * _ROW_BYTES, _ROW_BYTES)

    @staticmethod
    def _place(base: int, number: int) -> int:
        return base + _RING_AT + _ENTRY.size * (number % _RING)

    def _entries(self, number: int) -> list[Entry] | None:
        """Of all ranks."""
        found = []
        for base in self._bases():
            posted, *entry = _ENTRY.unpack_from(self._memory, self._place(base, number))
            if posted != number:
                return None
            found.append((entry[0], entry[1], entry[2]))
        return found

    def _text(self, base: int) -> str:
        at = base + _POSTED_ORDER_TEXT_AT
        return bytes(self._memory[at : at + _POSTED_ORDER_TEXT_BYTES]).split(b"\0")[0].decode(errors="replace")


_STEADY_LOOKS, _EVERY = 8, 3  # after so many looks at one place, a rank posts in every third look
_LEADER_SECONDS = 3.0


class RowsOfHosts:
    """Rows of ranks on several hosts, which are posted in the store, and only while ranks wait.

    A rank that has waited for a second posts its row, and then with each look; the first of them reads all rows, the others
    what it has found. So a wait costs each rank two or three small requests a second, less when it is long, and one rank one
    for each other.

    Args:
        name: the same on all ranks, and unique; index: of this rank among ``num_ranks``.
    """

    def __init__(self, name: str, index: int, num_ranks: int) -> None:
        self._name, self._index, self._num_ranks = f"vescale rows {name}", index, num_ranks
        self._at: object = None
        self._num_looks = self._number = 0
        self._leader: tuple[str, float] = ("", 0.0)
        self._counted: set[int] = set()  # turns in which this rank has found a difference
        self._known: dict[
            int, tuple[int, float]
        ] = {}  # of each rank the number of its post, and when it was seen first

    def is_due(self, at: object) -> bool:
        """Whether this look is one that posts. ``at``: where the rank waits."""
        self._num_looks = 0 if at != self._at else self._num_looks + 1
        self._at = at
        return self._num_looks < _STEADY_LOOKS or self._num_looks % _EVERY == 0

    def told(self, turn: int) -> list[dict[str, Any]] | None:
        """What another rank has found."""
        with connection() as store:
            found = peek(store, f"{self._name} {turn} found")
        return None if found is None else list(json.loads(found))

    def tell(self, turn: int, found: Apart) -> None:
        with connection() as store:
            store.set(f"{self._name} {turn} found", json.dumps([found.entries, found.texts]))

    def post(self, turn: int, row: bytes, awaited: Sequence[int] | None) -> bool:
        """Whether this rank is the one that reads all rows: the first, or the first after that no longer looks."""
        self._number += 1
        text = json.dumps([self._number, base64.b64encode(row).decode(), None if awaited is None else list(awaited)])
        place, now = f"{self._name} {turn}", time.monotonic()
        with connection() as store:
            store.set(f"{place} row {self._index}", text)
            own = f"{self._index} {self._number}"
            leader = store.compare_set(f"{place} leader", "", own).decode()
            if leader.split()[0] == str(self._index):
                store.set(f"{place} leader", own)
                return True
            if leader != self._leader[0]:
                self._leader = leader, now
            elif now - self._leader[1] > _LEADER_SECONDS * (1 if self._num_looks < _STEADY_LOOKS else _EVERY):
                return bool(store.compare_set(f"{place} leader", leader, own).decode() == own)
        return False

    def rows(self, turn: int) -> dict[int, tuple[bytes, list[int] | None, float]]:
        """Of other ranks that have posted: the row, for whom they wait, and when it was seen first, on this rank's clock."""
        found = {}
        with connection() as store:
            for index in range(self._num_ranks):
                text = None if index == self._index else peek(store, f"{self._name} {turn} row {index}")
                if text is None:
                    continue
                number, row, awaited = json.loads(text)
                if self._known.get(index, (0, 0.0))[0] != number:
                    self._known[index] = number, time.monotonic()
                found[index] = base64.b64decode(row), awaited, self._known[index][1]
        return found

    def wait_until_all_have_found_it(self, turn: int, end: float) -> None:
        own = int(turn not in self._counted)  # two threads of a rank may find it
        self._counted.add(turn)
        with connection() as store, contextlib.suppress(RuntimeError):
            found = store.add(f"{self._name} {turn} have found it", own)
            if found >= self._num_ranks:
                return
            while found < self._num_ranks and time.monotonic() < end:
                time.sleep(0.1)
                found = store.add(f"{self._name} {turn} have found it", 0)
            time.sleep(0.5)  # the last one is printing it
