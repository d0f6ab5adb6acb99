"""``Board``: what each rank of a host is about to do, in memory that all of them map; to compare it takes microseconds.

Each rank has a row, which it alone writes. What it posts has a number, the same on every rank, and consists of marks of 64
bits: 16 bits of the number and 48 of a digest, so that a mark tells by itself whether it is the one that is waited for.
The two latest posts of a rank are kept. A rank posts number n + 2 when all have read number n, because it has seen their
posts of number n + 1.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from vescale.comm._observation import Operation, tell_wait
from vescale.compat import default_store, is_alone

__all__ = ["Board", "RankGoneError"]

NUM_MARKS = 4
_TEXT_BYTES = 160
_ROW_BYTES = 256  # a row: 2 * NUM_MARKS marks, the process, the start of the process, the text
_PROCESS = 2 * NUM_MARKS
_TEXT_AT = 8 * (_PROCESS + 2)
_DIGEST_BITS = 48
# Ranks that share a core let each other run at once; after so many looks they sleep.
_LOOKS = 50
_SLEEP = 0.0002
_LIVENESS_SECONDS = 0.25


class RankGoneError(RuntimeError):
    """The process of another rank has ended; ``rank``: which one."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the process of rank {rank} has ended")
        self.rank = rank


class Board:
    """Made by all ``ranks`` together; ``place`` is a prefix of keys in the store that nobody else uses.

    ``Board.open`` returns None, on every rank, where they are not all on one host.
    """

    def __init__(self, ranks: Sequence[int], own: int, memory: mmap.mmap | bytearray) -> None:
        self.ranks, self._own, self._memory = tuple(ranks), own, memory
        self._bytes = memoryview(memory)
        self._cells = self._bytes.cast("Q")
        base = own * _ROW_BYTES
        self._cells[base // 8 + _PROCESS] = os.getpid()
        self._cells[base // 8 + _PROCESS + 1] = _started(os.getpid())

    @classmethod
    def open(cls, ranks: Sequence[int], place: str) -> Board | None:
        """A rendezvous through the store; the ranks that come late are waited for as long as the store waits."""
        own = list(ranks).index(dist.get_rank())
        size = len(ranks) * _ROW_BYTES
        if len(ranks) == 1 or is_alone():
            return cls(ranks[own : own + 1], 0, bytearray(_ROW_BYTES))
        store = default_store()
        store.set(f"{place} host {own}", _host())
        hosts = {bytes(store.get(f"{place} host {index}")) for index in range(len(ranks))}
        if len(hosts) > 1:
            return None
        if own == 0:
            store.set(f"{place} file", str(_new_file(size)))
        path = Path(store.get(f"{place} file").decode())
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
        except OSError:  # hosts with one name and folders of their own
            store.set(f"{place} lacks", "1")
            memory = None
        if store.add(f"{place} opened", 1) == len(ranks):
            with contextlib.suppress(OSError):
                path.unlink()
            store.set(f"{place} all", "1")
        store.get(f"{place} all")
        if memory is None or store.check([f"{place} lacks"]):
            return None
        return cls(ranks, own, memory)

    def post(self, number: int, digests: Sequence[int], text: str) -> list[int]:
        """Write this rank's marks, and a text about them; returns the marks."""
        low = (number & 0xFFFF) << _DIGEST_BITS
        marks = [low | (digest & ((1 << _DIGEST_BITS) - 1)) for digest in digests]
        base = self._own * _ROW_BYTES
        line = text.encode()[:_TEXT_BYTES]
        at = base + _TEXT_AT
        self._bytes[at : at + len(line) + 1] = line + b"\0"
        start = base // 8 + (number & 1) * NUM_MARKS
        for index, mark in enumerate(marks):
            self._cells[start + index] = mark
        return marks

    def rows(self, number: int, num_marks: int) -> list[list[int]] | None:
        """The marks of this number of every rank; None: some have not posted it."""
        wanted, offset, found = number & 0xFFFF, (number & 1) * NUM_MARKS, []
        for index in range(len(self.ranks)):
            start = index * _ROW_BYTES // 8 + offset
            marks = self._cells[start : start + num_marks].tolist()
            for mark in marks:
                if mark >> _DIGEST_BITS != wanted:
                    return None
            found.append(marks)
        return found

    def wait(
        self, number: int, num_marks: int, limit: float, is_paused: Callable[[], bool], what: str
    ) -> list[list[int]]:
        """:meth:`rows`, when all have posted. A hang report is told of a long wait, as ``what``.

        Raises RankGoneError if the process of a rank that has not posted ends; TimeoutError after ``limit`` seconds (twice
        that under a hang report, which names the ranks and where they are), of which those do not count in which
        ``is_paused()``.
        """
        for _ in range(_LOOKS):
            found = self.rows(number, num_marks)
            if found is not None:
                return found
            os.sched_yield()
        told: Operation | None = None
        try:
            begin = looked = time.monotonic()
            while True:
                found = self.rows(number, num_marks)
                if found is not None:
                    return found
                time.sleep(_SLEEP)
                now = time.monotonic()
                if now - looked > _LIVENESS_SECONDS:
                    if (
                        told is None
                        and (told := tell_wait(what, number, f"steps of {self.ranks}", self.ranks)) is not None
                    ):
                        limit *= 2
                    looked = now
                    gone = [index for index in self.absent(number) if self._has_ended(index)]
                    if gone and self.rows(number, num_marks) is None:
                        raise RankGoneError(self.ranks[gone[0]])
                    if now - begin > limit:
                        if not is_paused():
                            raise TimeoutError
                        begin = now
        finally:
            if told is not None:
                told.ended = time.time()

    def absent(self, number: int) -> list[int]:
        """Positions of the ranks that have not posted this number."""
        offset = (number & 1) * NUM_MARKS
        rows = ((index, index * _ROW_BYTES // 8 + offset) for index in range(len(self.ranks)))
        return [index for index, row in rows if self._cells[row] >> _DIGEST_BITS != number & 0xFFFF]

    def text(self, index: int) -> str:
        """What a rank has posted last."""
        at = index * _ROW_BYTES + _TEXT_AT
        return bytes(self._bytes[at : at + _TEXT_BYTES]).split(b"\0")[0].decode(errors="replace")

    def _has_ended(self, index: int) -> bool:
        row = index * _ROW_BYTES // 8 + _PROCESS
        process, start = self._cells[row], self._cells[row + 1]
        return process != 0 and start != 0 and _started(process) != start


def _host() -> str:
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
