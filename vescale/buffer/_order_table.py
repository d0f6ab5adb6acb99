"""The best order of tensors at one shard size, by a table over multisets.

Tensors of one kind are interchangeable, and of a prefix of the buffer only its end matters. So for every "c_1 tensors of
kind 1, c_2 of kind 2, ... are placed" the table holds the smallest possible end, as *slack*: the elements that may still
be left empty if everything else is packed without a gap. A table of prod(count_i + 1) entries covers all orders. Entries
without slack are dead. If several kinds lead to an entry, the first one is taken.

The C++ helper and numpy fill the same table, so that the result does not depend on a compiler. If positions exceed 64
bits, Python integers are used.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vescale import csrc
from vescale.buffer._offsets import earliest_start

__all__ = ["MAX_POSITION", "best_order", "num_states"]

MAX_POSITION = 1 << 61  # sums of two positions below it fit in int64


def num_states(counts: Sequence[int]) -> int:
    return math.prod(count + 1 for count in counts)


def best_order(
    numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    """Kinds in the order of the buffer (kind i appears counts[i] times) such that, each tensor placed as early as
    possible, the last one ends within ``limit``; None when no order does. Time and memory: O(num_states * kinds).

    Raises:
        MemoryError: there is no memory for the table.
    """
    if not counts:
        return []
    total = sum(numel * count for numel, count in zip(numels, counts, strict=True))
    if total > limit:
        return None
    if max(limit, shard, *blocks) >= MAX_POSITION:
        return _numpy(numels, blocks, counts, shard, limit - total, object)
    helper = csrc.load("planner")
    if helper is None:
        return _numpy(numels, blocks, counts, shard, limit - total, np.int64)
    return _native(helper, numels, blocks, counts, shard, limit)


def _native(
    helper: ctypes.CDLL, numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    sizes = ctypes.c_int64 * len(counts)
    order = (ctypes.c_int32 * sum(counts))()
    result = helper.planner_best_order(
        ctypes.c_int32(len(counts)),
        sizes(*numels),
        sizes(*blocks),
        sizes(*counts),
        ctypes.c_int64(shard),
        ctypes.c_int64(limit),
        order,
    )
    if result < 0:
        raise MemoryError(
            f"no memory for a planner table of {num_states(counts)} entries. Pass a smaller number as effort."
        )
    return list(order) if result else None


def _numpy(
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    shard: int,
    slack_at_start: int,
    dtype: type[np.int64] | type[object],
) -> list[int] | None:
    """One layer at a time: all living states with the same number of placed tensors."""
    strides = [num_states(counts[:i]) for i in range(len(counts))]
    slack: npt.NDArray = np.full(num_states(counts), -1, dtype)
    slack[0] = slack_at_start
    layer = np.zeros(1, np.int64)
    placed = np.zeros(1, dtype)
    for _ in range(sum(counts)):
        left = slack[layer]
        room = shard - (placed + slack_at_start - left) % shard
        successors, sizes = [], []
        for numel, block, count, stride in zip(numels, blocks, counts, strides, strict=True):
            remaining = left - _gaps(room, numel, block, shard, slack_at_start + 1)
            free = np.flatnonzero((layer // stride % (count + 1) < count) & (remaining >= 0))
            after = layer[free] + stride
            slack[after] = np.maximum(slack[after], remaining[free])
            successors.append(after)
            sizes.append(placed[free] + numel)
        layer, first = np.unique(np.concatenate(successors), return_index=True)
        placed = np.concatenate(sizes)[first]
        if not len(layer):
            return None
    return _walk_back(slack.tolist(), numels, blocks, counts, strides, shard)


def _gaps(room: npt.NDArray, numel: int, block: int, shard: int, too_large: int) -> npt.NDArray:
    """Elements left empty before a tensor that is placed as early as possible; ``too_large`` where it fits nowhere."""
    rest = room % block
    longest_head = shard - shard % block
    behind = room + shard - longest_head if numel - longest_head <= shard else too_large
    straight = (numel - (room - rest) <= shard) | (shard % block == 0)
    return np.where(numel <= room, 0, np.where(straight, rest, behind))


def _walk_back(
    slack: list[int],
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    strides: Sequence[int],
    shard: int,
) -> list[int]:
    left = list(counts)
    state = len(slack) - 1
    placed = sum(numel * count for numel, count in zip(numels, counts, strict=True))
    order = []
    while state:
        for i, stride in enumerate(strides):
            if left[i] and slack[state - stride] >= slack[state]:
                end = placed - numels[i] + slack[0] - slack[state - stride]
                start = earliest_start(end, numels[i], blocks[i], shard)
                if start is not None and slack[state - stride] - (start - end) == slack[state]:
                    break
        else:
            raise AssertionError("every living state has a living predecessor")
        order.append(i)
        left[i] -= 1
        placed -= numels[i]
        state -= strides[i]
    return order[::-1]
