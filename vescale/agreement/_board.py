"""``Board``: what each rank of a host is about to do, in memory that all of them map; to compare it takes microseconds.

Each rank has a row, which it alone writes. What it posts has a number, the same on every rank, and consists of marks of 64
bits: 16 bits of the number and 48 of a digest, so that a mark tells by itself whether it is the one that is waited for. The
two latest posts of a rank are kept. A rank posts number n + 2 when all have read number n, because it has seen their posts
of number n + 1. A board has channels, each with numbers of its own, on which parts of the ranks meet. A rank that waits for
long writes where, so that ranks that wait for each other on different channels find out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale import csrc
from vescale.agreement._round import Round
from vescale.agreement._store import connection
from vescale.comm import LONG_WAIT_SECONDS, Operation, look, tell_wait
from vescale.compat import is_alone
from vescale.errors import RankGoneError

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
        memory = _shared_memory(ranks, name, len(ranks) * 8 * _row_cells(channels))
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


def _shared_memory(ranks: Sequence[int], name: str, size: int) -> mmap.mmap | None:
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
