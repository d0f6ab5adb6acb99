"""The parts of a random stream that a rank generates, and where each generated element goes.

One device fills a tensor in memory order: element ``e`` of the *stream* is the e-th element of the global tensor in the
order of descending strides. A rank needs the elements of its :class:`~vescale.placements.Region`. It generates *spans*,
contiguous ranges of the stream, and copies the *pieces* that it owns out of them. Short gaps between owned elements are
generated and dropped; long ones are skipped. Index arithmetic only; both engines use it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vescale import csrc
from vescale.errors import ArgumentError
from vescale.placements import Region
from vescale.rng._philox import PhiloxState, philox

# A dim of a box: elements of the stream from one index to the next, and the owned indices as (start, length).
OwnedDim = tuple[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class Piece:
    """Generated elements to copy: strided views of the span and of the local tensor, with the same sizes."""

    sizes: tuple[int, ...]
    span_offset: int
    span_strides: tuple[int, ...]
    local_offset: int
    local_strides: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Elements ``start .. stop`` of the stream."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def direct(self) -> int | None:
        """The local offset at which the span can be generated in place; None if it must be copied."""
        if len(self.pieces) != 1:
            return None
        piece = self.pieces[0]
        if math.prod(piece.sizes) != self.stop - self.start or not is_contiguous(piece.sizes, piece.local_strides):
            return None
        return piece.local_offset


@dataclass(frozen=True)
class _Run:
    """``length`` consecutive indices of one dim, which start at ``start`` in the global tensor and at ``local`` in the
    local one."""

    start: int
    length: int
    local: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class _Dim:
    """One dim of a box, in stream order: its global size, the local stride, and the ranges that a rank owns."""

    size: int
    local_stride: int
    runs: tuple[_Run, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.runs) == 1 and self.runs[0].length == self.size


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these sizes and strides is row-major without holes (``Tensor.is_contiguous()``)."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def stream_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The dims of a global tensor from slowest to fastest in the order in which one device fills it."""
    # Dims of size 1 do not matter. Python's sort is stable, so that equal strides keep the order of the dims.
    return tuple(sorted(range(len(shape)), key=lambda dim: 0 if shape[dim] == 1 else -strides[dim]))


def _boxes(region: Region, local_strides: Sequence[int]) -> Iterator[tuple[int, list[_Dim]]]:
    """(local offset, dims) of the rectangular parts of the region, with dims in tensor order."""

    def dim(index: int, low: int, high: int, stride: int) -> _Dim:
        runs = []
        position = 0
        for start, stop in region.intervals[index]:
            first, last = max(low - position, 0), min(high - position, stop - start)
            if first < last:
                runs.append(_Run(start + first, last - first, position + first - low))
            position += stop - start
        return _Dim(region.global_shape[index], stride, tuple(runs))

    shape = region.shape
    if region.flat is None or not shape:
        yield 0, [dim(i, 0, shape[i], local_strides[i]) for i in range(len(shape))]
        return
    begin, end = region.flat
    stride = local_strides[0]
    row_major = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    for prefix, low, high in _cut(begin, end, shape):
        depth = len(prefix)
        ranges = [(i, i + 1) for i in prefix] + [(low, high)] + [(0, size) for size in shape[depth + 1 :]]
        start = sum(first * row_major[i] for i, (first, _) in enumerate(ranges))
        dims = [dim(i, *ranges[i], row_major[i] * stride) for i in range(len(shape))]
        yield (start - begin) * stride, dims


def _cut(begin: int, end: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Split the row-major range ``begin .. end`` of ``shape`` into boxes ``prefix x (low .. high) x everything``."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (), begin, end
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # inside one row
        for prefix, low, high in _cut(begin % row, end - last * row, shape[1:]):
            yield (last, *prefix), low, high
        return
    if begin < first * row:
        for prefix, low, high in _cut(begin % row, row, shape[1:]):
            yield (first - 1, *prefix), low, high
    if first < last:
        yield (), first, last
    if last * row < end:
        for prefix, low, high in _cut(0, end - last * row, shape[1:]):
            yield (last, *prefix), low, high


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    """Merge each whole dim into the one before it where the local strides allow it: fewer and longer runs."""
    merged: list[_Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if merged and dim.is_whole:
            outer = merged[-1]
            if outer.local_stride == dim.local_stride * dim.size or sum(run.length for run in outer.runs) == 1:
                scale = dim.size
                runs = tuple(_Run(run.start * scale, run.length * scale, run.local * scale) for run in outer.runs)
                # A single outer index is merged into the inner dim, whatever its stride is.
                merged[-1] = _Dim(outer.size * scale, dim.local_stride, runs)
                continue
        merged.append(dim)
    return merged or [_Dim(1, 1, (_Run(0, 1, 0),))]


def spans(
    region: Region, order: Sequence[int], local_strides: Sequence[int], max_elements: int, max_gap: int
) -> Iterator[Span]:
    """The spans that a rank generates, in stream order (row-major boxes of a ragged region follow one another).

    ``order``: the dims from slowest to fastest, see :func:`stream_order`. ``local_strides``: of the local tensor (one
    stride when the region is a flat slice). ``max_elements``: the longest span that is not generated in place.
    ``max_gap``: the longest gap that is generated and dropped. Communication: none.
    """
    if region.numel == 0:
        return
    for offset, dims in _boxes(region, local_strides):
        yield from _box_spans(offset, _merged([dims[i] for i in order]), max_elements, max_gap)


def owned_dims(region: Region, order: Sequence[int], local_strides: Sequence[int]) -> Iterator[list[OwnedDim]]:
    """The elements that a rank owns, by boxes in stream order: for each, dims from slowest to fastest.

    ``order`` and ``local_strides`` as for :func:`spans`; the local tensor has its elements in stream order.
    """
    for _, box in _boxes(region, local_strides):
        dims = _merged([box[i] for i in order])
        # Boxes of a ragged region keep their place in the outer dims as runs of one index.
        yield [
            (math.prod(inner.size for inner in dims[i + 1 :]), [(run.start, run.length) for run in dim.runs])
            for i, dim in enumerate(dims)
        ]


def _box_spans(local_offset: int, dims: list[_Dim], max_elements: int, max_gap: int) -> Iterator[Span]:
    rows = [
        math.prod(dim.size for dim in dims[i + 1 :]) for i in range(len(dims))
    ]  # elements from an index to the next
    level = _level(dims, rows, max_elements, max_gap)
    outer, dim, inner = dims[:level], dims[level], dims[level + 1 :]
    row = rows[level]
    first = sum(d.runs[0].start * r for d, r in zip(inner, rows[level + 1 :], strict=True))
    last = sum((d.runs[-1].stop - 1) * r for d, r in zip(inner, rows[level + 1 :], strict=True))
    # The pieces of each row, relative to its first owned element.
    parts = []
    for runs in itertools.product(*(d.runs for d in inner)):
        source = sum(run.start * r for run, r in zip(runs, rows[level + 1 :], strict=True)) - first
        target = sum(run.local * d.local_stride for run, d in zip(runs, inner, strict=True))
        parts.append((tuple(run.length for run in runs), source, target))
    inner_rows, inner_strides = tuple(rows[level + 1 :]), tuple(d.local_stride for d in inner)
    groups = list(_groups(dim, row, max_elements, max_gap))
    for index in itertools.product(*([(i, run) for run in d.runs for i in range(run.length)] for d in outer)):
        base = sum((run.start + i) * r for (i, run), r in zip(index, rows[:level], strict=True))
        local = local_offset + sum((run.local + i) * d.local_stride for (i, run), d in zip(index, outer, strict=True))
        for group in groups:
            start = base + group[0].start * row + first
            pieces = tuple(
                Piece(
                    (run.length, *sizes),
                    (run.start - group[0].start) * row + source,
                    (row, *inner_rows),
                    local + run.local * dim.local_stride + target,
                    (dim.local_stride, *inner_strides),
                )
                for run in group
                for sizes, source, target in parts
            )
            yield Span(start, base + (group[-1].stop - 1) * row + last + 1, pieces)


def _level(dims: list[_Dim], rows: list[int], max_elements: int, max_gap: int) -> int:
    """The outermost dim whose consecutive indices may share a span: its rows are short and its gaps too short to skip."""
    level = len(dims) - 1
    for i in range(len(dims) - 2, -1, -1):
        first = sum(d.runs[0].start * r for d, r in zip(dims[i + 1 :], rows[i + 1 :], strict=True))
        last = sum((d.runs[-1].stop - 1) * r for d, r in zip(dims[i + 1 :], rows[i + 1 :], strict=True))
        holes = [b.start - a.stop for a, b in itertools.pairwise(dims[i + 1].runs)]
        if rows[i] > max_elements or rows[i] - (last - first + 1) > max_gap:
            break
        if holes and max(holes) * rows[i + 1] > max_gap:
            break
        level = i
    return level


def _groups(dim: _Dim, row: int, max_elements: int, max_gap: int) -> Iterator[list[_Run]]:
    """The runs of a dim, grouped into spans: neighbours with a short gap together, at most ``max_elements``.

    With one element per index and no neighbour, a run stays whole, because it may be generated in place.
    """
    limit = max(1, max_elements // row)
    group: list[_Run] = []
    for run in dim.runs:
        if group and ((run.start - group[-1].stop) * row > max_gap or run.stop - group[0].start > limit):
            yield group
            group = []
        if run.length <= limit or (row == 1 and dim.local_stride == 1):
            group.append(run)
            continue
        for cut in range(0, run.length, limit):
            piece = _Run(run.start + cut, min(limit, run.length - cut), run.local + cut)
            yield [piece]
    if group:
        yield group


# Random bits that depend on an element's global index, not on who draws them or on what was drawn before. They come
# from no generator's state: a counter-based generator is asked for the number at a place. So ranks may draw their parts
# in any order, or not at all, and a resumed program draws what the interrupted one would have drawn.

_NUMBERS = 8  # numbers of 16 bits in a block of Philox
_CHUNK = 1 << 20


def indexed_bits(seed: int, stream: int, draw: int, runs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """16 random bits for each element of ``runs``, (global index of the first, number) in local order; uint16 on the CPU.

    Philox4x32-10 with key ``seed``: element ``i`` has number ``i % 8`` of the block ``i // 8``, in the subsequence that
    ``stream`` (31 bits, for example one for each parameter) and ``draw`` (32 bits, for example the step) name. The same on
    every mesh, with and without the C++ helper. No communication.
    """
    spans = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    if (spans < 0).any():
        raise ArgumentError(
            f"runs={spans.tolist()} have negative numbers; expected (index of the first element, number of elements)"
        )
    out = torch.empty(int(spans[:, 1].sum()), dtype=torch.uint16)
    subsequence = (stream & 0x7FFFFFFF) << 32 | draw & 0xFFFFFFFF
    seed &= 0xFFFFFFFFFFFFFFFF
    library = csrc.load("philox")
    if library is not None:
        library.philox_indexed_bits(
            ctypes.c_uint64(seed),
            ctypes.c_uint64(subsequence),
            ctypes.c_int64(len(spans)),
            ctypes.c_void_p(spans.ctypes.data),
            ctypes.c_int64(out.numel()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out
    target, begin = out.numpy(), 0
    for start, length in spans.tolist():
        for first in range(start, start + length, _CHUNK):
            stop = min(first + _CHUNK, start + length)
            blocks = np.arange(first // _NUMBERS, -(-stop // _NUMBERS), dtype=np.int64)
            drawn = philox(PhiloxState(seed, 0), np.array(subsequence), blocks).astype("<u4").view("<u2").reshape(-1)
            skipped = first % _NUMBERS
            target[begin : begin + stop - first] = drawn[skipped : skipped + stop - first]
            begin += stop - first
    return out
