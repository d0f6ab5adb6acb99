"""What the planner is compared with: slow definitions that share no code with it."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise


def cuts_a_block(offset: int, numel: int, block: int, shard: int) -> bool:
    """By definition: some shard boundary lies strictly inside the tensor, not at a multiple of block from its start."""
    first = offset // shard + 1
    last = (offset + numel - 1) // shard
    return any((boundary * shard - offset) % block for boundary in range(first, last + 1))


def check_layout(
    numels: tuple[int, ...],
    blocks: tuple[int, ...],
    num_shards: int,
    alignment: int,
    shard_size: int,
    offsets: tuple[int, ...],
    tensor_alignment: int = 1,
) -> None:
    """Fail unless the layout meets every condition of the problem."""
    assert shard_size % alignment == 0
    assert shard_size % tensor_alignment == 0
    spans = sorted((o, o + n) for o, n in zip(offsets, numels, strict=True) if n)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for offset, numel, block in zip(offsets, numels, blocks, strict=True):
        assert 0 <= offset <= offset + numel <= num_shards * shard_size
        assert offset % tensor_alignment == 0
        if numel:
            assert not cuts_a_block(offset, numel, block, shard_size)


def earliest_end(position: int, numel: int, block: int, shard: int, limit: int, tensor_alignment: int) -> int | None:
    """Try every start from ``position`` on."""
    start = -(-position // tensor_alignment) * tensor_alignment
    while start + numel <= limit:
        if not cuts_a_block(start, numel, block, shard):
            return start + numel
        start += tensor_alignment
    return None


def fits(
    numels: tuple[int, ...], blocks: tuple[int, ...], num_shards: int, shard: int, tensor_alignment: int = 1
) -> bool:
    """Whether any order of the tensors fits, by trying all sets of placed tensors."""
    limit = num_shards * shard
    if sum(numels) > limit:
        return False
    everything = (1 << len(numels)) - 1

    @cache
    def end(placed: int) -> int | None:
        ends = []
        for i in range(len(numels)):
            if placed >> i & 1:
                before = end(placed & ~(1 << i))
                if before is not None:
                    after = earliest_end(before, numels[i], blocks[i], shard, limit, tensor_alignment)
                    if after is not None:
                        ends.append(after)
        return 0 if not placed else min(ends, default=None)

    return end(everything) is not None


def fits_anywhere(numels: tuple[int, ...], blocks: tuple[int, ...], num_shards: int, shard: int) -> bool:
    """Whether any choice of offsets is a layout: not even "as early as possible" is taken for granted."""
    limit = num_shards * shard

    def place(i: int, taken: tuple[tuple[int, int], ...]) -> bool:
        if i == len(numels):
            return True
        for start in range(limit - numels[i] + 1):
            span = (start, start + numels[i])
            free = all(span[1] <= low or high <= span[0] for low, high in taken)
            legal = free and not cuts_a_block(start, numels[i], blocks[i], shard)
            if legal and place(i + 1, (*taken, span)):
                return True
        return False

    return place(0, ())


def smallest_shard(
    numels: tuple[int, ...],
    blocks: tuple[int, ...],
    num_shards: int,
    alignment: int,
    tensor_alignment: int = 1,
) -> int:
    """The optimum over all orders, trying every shard size."""
    if not any(numels):
        return 0
    numels, blocks = zip(*[(n, b) for n, b in zip(numels, blocks, strict=True) if n], strict=True)
    unit = math.lcm(alignment, tensor_alignment)
    shard = unit
    while not fits(numels, blocks, num_shards, shard, tensor_alignment):
        shard += unit
    return shard
