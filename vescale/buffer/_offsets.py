"""Offsets of tensors in a fixed order, each as early as possible. The only state is the position where the last tensor
ends.

A shard boundary may cut a tensor only between two of its blocks. For the next tensor, with ``room`` elements before the
next boundary:

* it fits in the room, or its first blocks (its ``head``) fill the end of the room and the rest follows;
* a tensor that contains a whole shard needs ``shard % block == 0``, and then every boundary is legal;
* otherwise it crosses one boundary only, so that ``numel - head <= shard``, and the longest head is the best one.

The earliest legal start is monotone in the position. Therefore placing each tensor as early as possible is optimal for an
order, and costs O(1) a tensor for any number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["earliest_start", "last_end", "offsets_in_order", "round_up"]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def earliest_start(end: int, numel: int, block: int, shard: int) -> int | None:
    """The smallest legal offset at or after ``end``; None when the tensor fits nowhere with this shard size."""
    room = shard - end % shard
    if numel <= room:
        return end
    head = room - room % block
    if numel - head <= shard or shard % block == 0:
        return end + room - head
    head = shard - shard % block
    return end + room + shard - head if numel - head <= shard else None


def last_end(numels: Sequence[int], blocks: Sequence[int], order: Iterable[int], shard: int, limit: int) -> int | None:
    """Where the last tensor of ``order`` ends; None when one fits nowhere or the end passes ``limit``."""
    end = 0
    for i in order:  # the body of earliest_start, inline: the planner's time in pure Python is spent here
        numel = numels[i]
        room = shard - end % shard
        if numel > room:
            block = blocks[i]
            head = room - room % block
            if numel - head <= shard or shard % block == 0:
                end += room - head
            else:
                head = shard - shard % block
                if numel - head > shard:
                    return None
                end += room + shard - head
        end += numel
        if end > limit:
            return None
    return end


def offsets_in_order(numels: Sequence[int], blocks: Sequence[int], order: Iterable[int], shard: int) -> list[int]:
    """Offsets, in the caller's tensor order, of tensors placed as early as possible in ``order`` (which must fit)."""
    offsets = [0] * len(numels)
    end = 0
    for i in order:
        start = earliest_start(end, numels[i], blocks[i], shard)
        assert start is not None, "offsets are taken only of an order that was found to fit"
        offsets[i] = start
        end = start + numels[i]
    return offsets
