"""Which bytes of which files a block of a tensor is made of: few, large, sorted reads."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vescale.checkpoint._local_blocks import LocalBlocks
from vescale.checkpoint._stored import StoredBox, StoredTensor
from vescale.errors import DamagedFileError
from vescale.placements import Box, contiguous_stride

__all__ = ["MAX_READ_BYTES", "BoxIndex", "ByteRead", "plan_reads"]

MAX_READ_BYTES = 8 << 20
"""One read is at most this long, unless it goes straight into the tensor's own memory."""

# Elements that are not wanted are read over, rather than skipped, where they are fewer bytes than this: the device and the
# page cache read whole pages anyway.
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class ByteRead:
    """A range of bytes of a file, and where its elements belong.

    Attributes:
        file, start, nbytes: the range.
        target: view of the tensor that the elements are for.
        sizes, strides: the elements within the range, in elements of ``dtype``, as ``as_strided`` takes them.
        dtype: of the file.
    """

    file: str
    start: int
    nbytes: int
    target: torch.Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read into the target's memory as they are."""
        return (
            self.target.is_contiguous()
            and not (self.target.is_conj() or self.target.is_neg())
            and self.target.is_cpu
            and self.target.dtype == self.dtype
            and self.nbytes == self.target.numel() * self.dtype.itemsize
            and _is_row_major(self.sizes, self.strides)
        )


class BoxIndex:
    """Finds the stored boxes of a tensor that overlap a block, without looking at all of them."""

    def __init__(self, name: str, stored: StoredTensor) -> None:
        self.name, self.stored = name, stored
        self._boxes: Sequence[StoredBox] = stored.boxes
        self._firsts: Sequence[tuple[int, ...]] = ()
        self._longest = 0
        if len(self._boxes) > 1:
            self._boxes = sorted(stored.boxes, key=lambda box: box.offset)
            self._firsts = [box.offset[:1] for box in self._boxes]
            self._longest = max((box.sizes[0] for box in self._boxes if box.sizes), default=0)

    def overlapping(self, block: Box) -> Iterator[tuple[StoredBox, Box]]:
        """(stored box, part of ``block`` that it holds). Raises CheckpointError if boxes leave elements out."""
        low, high = 0, len(self._boxes)
        if block.offset and high > 1:
            low = bisect.bisect_right(self._firsts, (block.offset[0] - self._longest,))
            high = bisect.bisect_left(self._firsts, (block.offset[0] + block.sizes[0],))
        found = 0
        for box in self._boxes[low:high]:
            common = block.part_in(box.offset, box.sizes)
            if common is not None:
                found += common.numel
                yield box, common
        if found != block.numel:
            raise DamagedFileError(
                f"{self.name}: the checkpoint's boxes hold {found} of the {block.numel} elements of the block at "
                f"{block.offset} of sizes {block.sizes}; its index is damaged"
            )


def plan_reads(index: BoxIndex, blocks: LocalBlocks) -> Iterator[ByteRead]:
    """The reads that fill the blocks which this rank holds of one tensor."""
    for block in blocks.boxes:
        for box, part in index.overlapping(block):
            yield from _reads(box, part, blocks.view(part), index.stored.dtype)


def _reads(box: StoredBox, part: Box, target: torch.Tensor, dtype: torch.dtype) -> Iterator[ByteRead]:
    strides = box.strides if box.strides is not None else contiguous_stride(box.sizes)
    shift = sum((a - b) * s for a, b, s in zip(part.offset, box.offset, strides))
    yield from _split(box.file, box.start, shift, target, part.sizes, tuple(strides), dtype)


def _split(
    file: str,
    start: int,
    first: int,
    target: torch.Tensor,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[ByteRead]:
    """Cut until a read skips no page and is short enough; the dim with the largest stride is cut first."""
    size = dtype.itemsize
    span = sum((n - 1) * s for n, s in zip(sizes, strides)) + 1
    read = ByteRead(file, start + first * size, span * size, target, sizes, strides, dtype)
    if read.is_direct:
        yield read
        return
    outer = max((dim for dim, n in enumerate(sizes) if n > 1), key=lambda dim: strides[dim], default=None)
    if outer is None:
        yield read
        return
    inner = span - (sizes[outer] - 1) * strides[outer]
    if (strides[outer] - inner) * size >= _PAGE:
        rows = 1
    elif span * size > MAX_READ_BYTES:
        rows = max(1, (MAX_READ_BYTES // size - inner) // strides[outer] + 1)
    elif _skips_pages(sizes, strides, size):
        rows = 1
    else:
        yield read
        return
    for at in range(0, sizes[outer], rows):
        length = min(rows, sizes[outer] - at)
        cut = (*sizes[:outer], length, *sizes[outer + 1 :])
        yield from _split(
            file, start, first + at * strides[outer], target.narrow(outer, at, length), cut, strides, dtype
        )


def _skips_pages(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether somewhere between the elements are pages that nobody wants."""
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, sizes) if n > 1):
        if (stride - span) * itemsize >= _PAGE:
            return True
        span += (size - 1) * stride
    return False


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return math.prod(sizes) > 0
