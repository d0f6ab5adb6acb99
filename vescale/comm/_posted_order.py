"""``PostedOrder``: which collectives each rank of a host has begun, in memory that all of them map.

Nobody waits for anybody.

Each rank has a row, which it alone writes: how many entries it has posted, where it waits, and its latest entries in a ring.
An entry has its number, so that a reader knows whether it is the one that it looks for. The number is written last, so
that an entry with a number is complete.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from vescale.comm._board import shared_memory
from vescale.compat import is_alone

__all__ = ["Apart", "PostedOrder"]

Entry = tuple[int, int, int]

_ENTRY, _BEGINNING, _CONTENT = struct.Struct("4Q"), struct.Struct("3Q"), struct.Struct("3Q")
_RING = 64
# A row: the number of the last entry; when the rank has waited last, in nanoseconds, and how; whether it has found a
# difference; a text about its wait; the ring.
_NUMBER, _WAIT, _FOUND = struct.Struct("Q"), struct.Struct("2Q"), struct.Struct("Q")
_WAIT_AT, _FOUND_AT, _TEXT_AT, _TEXT_BYTES, _RING_AT = 8, 24, 32, 96, 128
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
    """Made by ``PostedOrder.open``, which all ``ranks`` call together."""

    def __init__(self, ranks: Sequence[int], memory: memoryview) -> None:
        self.ranks = tuple(ranks)
        self._memory = memory
        self._base = self.ranks.index(dist.get_rank()) * _ROW_BYTES
        self._number = 0
        self._seen: tuple[Apart | None, float] = (None, 0.0)

    @classmethod
    def open(cls, ranks: Sequence[int], place: str) -> PostedOrder | None:
        """None, on every rank: they are not on one host, or do not communicate by gloo. ``place``: of the rendezvous, a
        prefix of keys in the store that nobody else uses."""
        if len(ranks) == 1 or is_alone() or dist.get_backend() != "gloo":
            return None
        memory = shared_memory(ranks, place, len(ranks) * _ROW_BYTES)
        return None if memory is None else cls(ranks, memoryview(memory))

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

    def apart(self, awaited: Sequence[int] | None, what: str) -> Apart | None:
        """Of ranks that wait for each other in vain; see :meth:`Look.look`. None: they may still meet.

        They do not, if the collectives that they have begun under one number do not pair. Nor if ranks wait in a
        collective that others have not begun, and these wait for them, while no rank does anything else. They have to be
        seen so for a while, because ranks may be about to raise by themselves.
        """
        numbers = [_NUMBER.unpack_from(self._memory, base)[0] for base in self._bases()]
        self._note_wait(awaited, what, numbers)
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
        _FOUND.pack_into(self._memory, self._base + _FOUND_AT, 1)
        end = time.monotonic() + _ALL_FOUND_SECONDS
        while time.monotonic() < end:
            if all(_FOUND.unpack_from(self._memory, base + _FOUND_AT)[0] for base in self._bases()):
                return
            time.sleep(0.01)

    def _note_wait(self, awaited: Sequence[int] | None, what: str, numbers: Sequence[int]) -> None:
        own, how = numbers[self._base // _ROW_BYTES], _IN_A_COLLECTIVE
        if awaited is not None:
            ahead = {rank for rank, number in zip(self.ranks, numbers) if number > own}
            how = _FOR_OTHERS if ahead <= set(awaited) else _ELSEWHERE
        line = what.encode()[: _TEXT_BYTES - 1]
        at = self._base + _TEXT_AT
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
        at = base + _TEXT_AT
        return bytes(self._memory[at : at + _TEXT_BYTES]).split(b"\0")[0].decode(errors="replace")
