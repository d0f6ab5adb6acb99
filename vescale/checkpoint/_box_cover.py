"""Whether the boxes of a tensor are disjoint and leave nothing out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vescale.checkpoint._stored import StoredBox

__all__ = ["cover_fault"]

_MAX_CELLS = 1 << 24


def cover_fault(boxes: Sequence[StoredBox], shape: Sequence[int]) -> str | None:
    """What is wrong with boxes that should cover a tensor exactly once; None where nothing is.

    The borders of all boxes cut the tensor into cells, and each cell has to be in one box.
    """
    boxes = [box for box in boxes if box.numel]
    if any(at < 0 or at + size > n for box in boxes for at, size, n in zip(box.offset, box.sizes, shape)):
        return "reach out of it"
    if sum(box.numel for box in boxes) != math.prod(shape):
        return "do not make it up: they overlap, or some are missing"
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
