"""Parts of stored tensors, so that tensors of any size go through bounded memory; in one process, without ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vescale.checkpoint._index_map import row_major
from vescale.checkpoint._reader import read_tensors
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor

BLOCK_BYTES = 32 << 20


def blocks_of(stored: Stored, name: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offset, values) of row-major runs of a tensor, in order, each at most ``BLOCK_BYTES``; none without elements."""
    tensor = stored.tensors[name]
    for offset, sizes in block_shapes(tensor.shape, BLOCK_BYTES // tensor.dtype.itemsize):
        yield offset, block_values(stored, name, offset, sizes)


def block_shapes(shape: Sequence[int], max_numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of blocks of at most so many elements, in row-major order, each a contiguous run."""
    if math.prod(shape) == 0:
        return
    if math.prod(shape) <= max_numel or not shape:
        yield (0,) * len(shape), tuple(shape)
        return
    rows = max_numel // max(1, math.prod(shape[1:]))
    for first in range(0, shape[0], max(rows, 1)):
        if rows >= 1:
            yield (first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:])
        else:
            for offset, sizes in block_shapes(shape[1:], max_numel):
                yield (first, *offset), (1, *sizes)


def block_values(stored: Stored, name: str, first: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A block of a tensor on the CPU; only its bytes are read. Raises CheckpointError where files are too short."""
    tensor = stored.tensors[name]
    part = StoredTensor(tuple(sizes), tensor.dtype, tuple(_cut(tensor, first, sizes)))
    found = torch.empty(tuple(sizes), dtype=tensor.dtype, device="cpu")
    read_tensors(Stored(stored.folder, {name: part}, stored.format), {name: found}, share=False)
    return found


def _cut(tensor: StoredTensor, first: Sequence[int], sizes: Sequence[int]) -> Iterator[StoredBox]:
    """The boxes of a block, with offsets within it."""
    for box in tensor.boxes:
        low = tuple(max(a, b) for a, b in zip(first, box.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(first, sizes, box.offset, box.sizes))
        if any(a >= b for a, b in zip(low, high)):
            continue
        strides = box.strides or row_major(box.sizes)
        shift = sum((a - at) * stride for a, at, stride in zip(low, box.offset, strides))
        yield StoredBox(
            tuple(a - at for a, at in zip(low, first)),
            tuple(b - a for a, b in zip(low, high)),
            box.file,
            box.start + shift * tensor.dtype.itemsize,
            tuple(strides),
        )


# Whether the boxes of a tensor are disjoint and leave nothing out.

_MAX_CELLS = 1 << 24


def cover_fault(boxes: Sequence[StoredBox], shape: Sequence[int]) -> str | None:
    """What is wrong with boxes that should cover a tensor exactly once; None where nothing is.

    The borders of all boxes cut the tensor into cells, and each cell has to be in one box.
    """
    boxes = [box for box in boxes if box.numel]
    if any(at < 0 or at + size > n for box in boxes for at, size, n in zip(box.offset, box.sizes, shape)):
        return "extend past it"
    if sum(box.numel for box in boxes) != math.prod(shape):
        return "do not cover it exactly: they overlap, or some are missing"
    if len(boxes) < 2:
        return None
    cuts = [
        sorted({at for box in boxes for at in (box.offset[d], box.offset[d] + box.sizes[d])}) for d in range(len(shape))
    ]
    index = [{at: number for number, at in enumerate(places)} for places in cuts]
    if math.prod(len(places) - 1 for places in cuts) > _MAX_CELLS:
        return _pairwise(boxes)
    cells = np.zeros([len(places) - 1 for places in cuts], np.bool_)
    for box in boxes:
        block = tuple(
            slice(index[d][at], index[d][at + size]) for d, (at, size) in enumerate(zip(box.offset, box.sizes))
        )
        if cells[block].any():
            return "overlap"
        cells[block] = True
    return None


def _pairwise(boxes: Sequence[StoredBox]) -> str | None:
    low = np.array([box.offset for box in boxes])
    high = low + np.array([box.sizes for box in boxes])
    for number in range(len(boxes)):
        meet = (low[number + 1 :] < high[number]).all(1) & (high[number + 1 :] > low[number]).all(1)
        if meet.any():
            return "overlap"
    return None
