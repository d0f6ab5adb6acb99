"""The schedule of ring attention: which block of keys each rank has at each step, and which queries attend to it.

It depends on positions alone, and is the same on all ranks; ``explain`` evaluates it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Meeting", "RingSchedule", "Runs", "meetings"]

Runs = tuple[tuple[int, int], ...]
"""Intervals [start, stop) of global positions that a rank holds, ascending."""


@dataclass(frozen=True)
class RingSchedule:
    """Blocks of keys and values, one from each rank, are passed round a ring of ranks.

    At step 0 a rank holds its own block, at step ``s`` the one of the rank ``s`` places before it. A block is passed on as
    long as a later rank needs it: contiguous causal shards never pass the end of the sequence.

    Attributes:
        rows: for each rank of the ring the positions of its queries.
        keys: for each rank the positions of its keys.
        is_causal: whether a query attends only to keys up to its own position.
    """

    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.keys)

    def length(self, owner: int) -> int:
        """The number of keys in the block of rank ``owner``."""
        return sum(stop - start for start, stop in self.keys[owner])

    def needs(self, rank: int, owner: int) -> bool:
        """Whether a query of ``rank`` attends to a key of ``owner``."""
        rows, keys = self.rows[rank], self.keys[owner]
        if not rows or not keys:
            return False
        return not self.is_causal or rows[-1][1] > keys[0][0]

    @functools.cached_property
    def last_steps(self) -> tuple[int, ...]:
        """For each block the last step at which a rank needs it."""
        num = self.num_ranks
        steps = ([s for s in range(num) if self.needs((owner + s) % num, owner)] for owner in range(num))
        return tuple(max(found, default=0) for found in steps)

    @property
    def num_steps(self) -> int:
        """The number of steps at which some rank attends; blocks move before each but the first."""
        return 1 + max(self.last_steps)

    def held(self, rank: int, step: int) -> int | None:
        """The owner of the block that ``rank`` holds at ``step``; None if it holds none."""
        owner = (rank - step) % self.num_ranks
        return owner if step <= self.last_steps[owner] and self.keys[owner] else None

    def forward_moves(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(source, target, owner) of the blocks that are sent before ``step``."""
        for rank in range(self.num_ranks):
            owner = self.held(rank, step)
            if owner is not None:
                yield (rank - 1) % self.num_ranks, rank, owner

    def gradient_moves(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(source, target, owner) of the gradients of blocks that are sent after ``step``: with the block or, after its last
        step, to its owner."""
        for rank in range(self.num_ranks):
            owner = self.held(rank, step)
            if owner is None:
                continue
            to = (rank + 1) % self.num_ranks if step < self.last_steps[owner] else owner
            if to != rank:
                yield rank, to, owner


@dataclass(frozen=True)
class Meeting:
    """Rows of a rank that attend to keys of a block, as local intervals [start, stop).

    ``is_causal``: there are as many rows as keys, and row i attends to the first i + 1 keys; else each row attends to all.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool = False


@functools.lru_cache(maxsize=4096)
def meetings(rows: Runs, keys: Runs, is_causal: bool) -> tuple[Meeting, ...]:
    """Which rows of a rank attend to which keys of a block: rectangles, and triangles on the diagonal."""
    num_rows, num_keys = (sum(stop - start for start, stop in runs) for runs in (rows, keys))
    if not num_rows or not num_keys:
        return ()
    if not is_causal:
        return (Meeting((0, num_rows), (0, num_keys)),)
    found: list[Meeting] = []
    row_offset = 0
    for first, end in rows:
        before = sum(min(stop, first) - start for start, stop in keys if start < first)
        own = (row_offset, row_offset + end - first)
        if before:  # the keys before the first row of the run, which are first in the block
            found.append(Meeting(own, (0, before)))
        key_offset = 0
        for start, stop in keys:
            a, b = max(start, first), min(stop, end)
            if a < b:
                local = (key_offset + a - start, key_offset + b - start)
                found.append(Meeting((row_offset + a - first, row_offset + b - first), local, is_causal=True))
                if b < end:
                    found.append(Meeting((row_offset + b - first, own[1]), local))
            key_offset += stop - start
        row_offset += end - first
    return tuple(found)
