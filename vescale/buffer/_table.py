"""The best order of tensors at one shard size, by a table over multisets.

Tensors of one kind are interchangeable and the state of a prefix is only where it ends, so "the smallest end of any
prefix that uses c_1 tensors of kind 1, c_2 of kind 2, ..." decides over all orders with prod(c_i + 1) entries.
Entries whose end leaves too little of ``limit`` for the unplaced tensors are dead. Among kinds that explain an entry
the first one is taken. The C++ helper and the numpy form fill the same table, so the answer never depends on whether a
compiler was present; numpy counts in Python integers when positions do not fit in 62 bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vescale import csrc

__all__ = ["best_order", "num_states"]

_WORD = 1 << 62  # positions below it are safe in the int64 of both forms, their sums too


def num_states(counts: Sequence[int]) -> int:
    return math.prod(count + 1 for count in counts)


def best_order(
    numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    """Kinds in the order of the buffer (kind i appears counts[i] times), such that placing each tensor as early as
    possible ends within ``limit``; None when no order does. Time and memory: O(num_states * kinds)."""
    if not counts:
        return []
    if max(limit, shard) + max(numels) + 2 * shard < _WORD:
        helper = csrc.load("planner")
        if helper is not None:
            return _native(helper, numels, blocks, counts, shard, limit)
        return _numpy(numels, blocks, counts, shard, limit, np.int64)
    return _numpy(numels, blocks, counts, shard, limit, object)


def _native(
    helper: ctypes.CDLL, numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    kinds = ctypes.c_int64 * len(counts)
    ends = np.empty(num_states(counts), np.int64)
    order = np.empty(sum(counts), np.int32)
    fits = helper.planner_fill_table(
        ctypes.c_int32(len(counts)),
        kinds(*numels),
        kinds(*blocks),
        kinds(*counts),
        ctypes.c_int64(shard),
        ctypes.c_int64(limit),
        ctypes.c_void_p(ends.ctypes.data),
        ctypes.c_void_p(order.ctypes.data),
    )
    return order.tolist() if fits else None


def _numpy(
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    shard: int,
    limit: int,
    dtype: type[np.int64] | type[object],
) -> list[int] | None:
    """One layer at a time: all living states with the same number of placed tensors."""
    strides = [num_states(counts[:i]) for i in range(len(counts))]
    never = np.iinfo(np.int64).max if dtype is np.int64 else 2 * limit + 1
    ends: npt.NDArray = np.full(num_states(counts), never, dtype)
    ends[0] = 0
    layer = np.zeros(1, np.int64)
    unplaced = np.array([sum(n * c for n, c in zip(numels, counts, strict=True))], dtype)
    for _ in range(sum(counts)):
        end = ends[layer]
        room = shard - end % shard
        successors, left = [], []
        for numel, block, count, stride in zip(numels, blocks, counts, strides, strict=True):
            free = np.flatnonzero(layer // stride % (count + 1) < count)
            start, legal = _earliest_starts(end[free], room[free], numel, block, shard)
            keep = legal & (start + unplaced[free] <= limit)
            free = free[keep]
            after = layer[free] + stride
            ends[after] = np.minimum(ends[after], start[keep] + numel)
            successors.append(after)
            left.append(unplaced[free] - numel)
        layer, first = np.unique(np.concatenate(successors), return_index=True)
        unplaced = np.concatenate(left)[first]
        if not len(layer):
            return None
    return _walk_back(ends.tolist(), numels, blocks, counts, strides, shard)


def _earliest_starts(
    end: npt.NDArray, room: npt.NDArray, numel: int, block: int, shard: int
) -> tuple[npt.NDArray, npt.NDArray]:
    """:func:`vescale.buffer._placing.earliest_start` of many ends at once: (starts, which of them are legal)."""
    head = room - room % block
    longest = shard - shard % block
    here = (numel - head <= shard) | (shard % block == 0)
    start = np.where(here, end + room - head, end + room + shard - longest)
    fits = numel <= room
    return np.where(fits, end, start), fits | here | (numel - longest <= shard)


def _walk_back(
    ends: list[int],
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    strides: Sequence[int],
    shard: int,
) -> list[int]:
    from vescale.buffer._placing import earliest_start

    left = list(counts)
    state = len(ends) - 1
    order = []
    while state:
        for i, stride in enumerate(strides):
            if left[i] and ends[state - stride] <= ends[state]:
                start = earliest_start(ends[state - stride], numels[i], blocks[i], shard)
                if start is not None and start + numels[i] == ends[state]:
                    break
        else:
            raise AssertionError("every living state has a living predecessor")
        order.append(i)
        left[i] -= 1
        state -= stride
    return order[::-1]
