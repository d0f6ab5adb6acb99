"""Intervals of indices of one dim: what shard-like placements leave of it to a rank."""

from __future__ import annotations

from vescale.errors import PlacementError
from vescale.placements._flattened import FlattenedShard

__all__ = ["Interval", "clip", "common", "global_index", "middle_chunks", "strided_chunks"]

Interval = tuple[int, int]


def _chunk(size: int, num_chunks: int, index: int) -> Interval:
    """``torch.chunk`` semantics, with empty chunks at the end."""
    step = -(-size // num_chunks)
    return min(size, step * index), min(size, step * (index + 1))


def strided_chunks(size: int, num_pieces: int, num_ranks: int, index: int) -> list[Interval]:
    """The dim is chunked into pieces, each piece over the ranks; rank ``index`` holds its chunk of every piece."""
    found = []
    for piece in range(num_pieces):
        start, stop = _chunk(size, num_pieces, piece)
        low, high = _chunk(stop - start, num_ranks, index)
        if low < high:
            found.append((start + low, start + high))
    return found


def middle_chunks(
    shape: tuple[int, ...], placement: FlattenedShard, num_ranks: int, index: int
) -> tuple[Interval, ...]:
    """Global indices of a dim that is the flattening of ``(outer, size, inner)``, of which ``size`` is chunked."""
    length, period = shape[placement.dim], placement.size * placement.inner
    if length % period:
        raise PlacementError(
            f"{placement!r}: dim {placement.dim} of the tensor of shape {shape} is no flattening of dims of sizes (..., "
            f"{placement.size}, {placement.inner}); its size {length} has to be a multiple of {period}"
        )
    low, high = (bound * placement.inner for bound in _chunk(placement.size, num_ranks, index))
    if low == high:
        return ()
    if high - low == period:
        return ((0, length),) if length else ()
    return tuple((start + low, start + high) for start in range(0, length, period))


def common(a: tuple[Interval, ...], b: tuple[Interval, ...]) -> tuple[Interval, ...]:
    """The intersection of two lists of intervals of ascending indices."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            found.append((low, high))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def clip(ranges: tuple[Interval, ...], low: int, high: int) -> list[tuple[int, int, int]]:
    """Local indices ``[low, high)`` of a concatenation of ranges as ``(global start, local start, length)`` pieces."""
    found = []
    first = 0
    for start, stop in ranges:
        lo, hi = max(low, first), min(high, first + stop - start)
        if lo < hi:
            found.append((start + lo - first, lo, hi - lo))
        first += stop - start
    return found


def global_index(ranges: tuple[Interval, ...], index: int) -> int:
    for start, stop in ranges:
        if index < stop - start:
            return start + index
        index -= stop - start
    raise IndexError(index)
