"""Tensors that have no values, only the origin of each of their elements.

Checkpoints of Hugging Face models have other names and shapes than the modules that they are for: experts one by one, a
fused projection in parts, rows in another order. transformers describes the way between the two as small programs of
shape operations (``Chunk``, ``MergeModulelist``, ``PermuteForRope``, ...). Run on a :class:`MappedTensor`, such a program
tells which element of a file each element of a parameter is. So a rank can read, or write, the slices that it holds, and
programs that are not yet written need nothing here as long as they only move elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vescale.compat.tensor_subclasses import WrapperTensor
from vescale.placements import contiguous_stride

_MAX_PARTS = 1 << 17


class NotAnIndexMapError(RuntimeError):
    """A conversion computes values, or moves elements in too many parts; it has to run on whole tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor whose elements are those of a source at a start and with strides.

    Attributes:
        offset: index of the block's first element in the tensor, one per dim.
        sizes: one per dim.
        source: name of the tensor that the elements are from.
        start: row-major position of the first element in the source, in elements.
        strides: one per dim, in elements of the source.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    source: str
    start: int
    strides: tuple[int, ...]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of this shape."""
    return _row_major(tuple(shape))


@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return contiguous_stride(shape)


def source_axes(part: Part, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]] | None:
    """A part in the coordinates of its source: index of the first element there, and (source dim, step) of each dim.

    None where some dim of the part is no single dim of the source, or two are the same one.
    """
    origin, rest = [], part.start
    strides = row_major(shape)
    for stride in strides:
        index, rest = divmod(rest, stride)
        origin.append(index)
    axes: list[tuple[int, int]] = []
    used: set[int] = set()
    for size, stride in zip(part.sizes, part.strides):
        if size == 1:
            axes.append((-1, 0))
            continue
        for dim, own in enumerate(strides):
            if dim not in used and stride % own == 0 and origin[dim] + (size - 1) * (stride // own) < shape[dim]:
                axes.append((dim, stride // own))
                used.add(dim)
                break
        else:
            return None
    return tuple(origin), tuple(axes)


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Where the elements of a tensor come from.

    Attributes:
        shape: of the tensor.
        dtype: of its elements.
        parts: disjoint blocks that cover it; none if it is empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> IndexMap:
        """The source itself."""
        sizes = tuple(shape)
        whole = Part((0,) * len(sizes), sizes, source, 0, row_major(sizes))
        return cls(sizes, dtype, (whole,) if math.prod(sizes) else ())

    def swap_last_dims(self) -> IndexMap:
        """The map of the tensor whose last two dims are exchanged."""

        def swap(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[:-2], values[-1], values[-2])

        parts = (
            Part(swap(part.offset), swap(part.sizes), part.source, part.start, swap(part.strides))
            for part in self.parts
        )
        return IndexMap(swap(self.shape), self.dtype, tuple(parts))


class MappedTensor(WrapperTensor):
    """A tensor of known origin, for programs of shape operations; every result is contiguous.

    Raises :class:`NotAnIndexMapError` from any operation that does more than moving elements.
    """

    parts: tuple[Part, ...]

    @classmethod
    def made_of(cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> MappedTensor:
        # On the meta device nothing is allocated, and strides are those of a contiguous tensor.
        made = cls.with_looks_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        made.parts = tuple(parts)
        if len(made.parts) > _MAX_PARTS:
            raise NotAnIndexMapError(f"{len(made.parts)} separate parts")
        return made

    @classmethod
    def of(cls, source: str, shape: Sequence[int], dtype: torch.dtype) -> MappedTensor:
        """The source itself."""
        return cls.made_of(shape, dtype, IndexMap.of(source, shape, dtype).parts)

    @property
    def index_map(self) -> IndexMap:
        return IndexMap(tuple(self.shape), self.dtype, self.parts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MappedTensor({tuple(self.shape)}, {self.dtype}, {len(self.parts)} parts)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        run = _OPS.get(func.overloadpacket)
        if run is None:
            raise NotAnIndexMapError(f"{func} does more than move elements")
        return run(*args, **(kwargs or {}))


def _unchanged(tensor: MappedTensor, *args: Any, **kwargs: Any) -> MappedTensor:
    if kwargs.get("dtype") not in (None, tensor.dtype):
        raise NotAnIndexMapError(f"a cast from {tensor.dtype} to {kwargs['dtype']}")
    return MappedTensor.made_of(tensor.shape, tensor.dtype, tensor.parts)


def _slice(
    tensor: MappedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> MappedTensor:
    dim %= tensor.ndim
    picked = range(tensor.shape[dim])[slice(start, end, step)]
    found = []
    for part in tensor.parts:
        # Indices of `picked` inside of the part: from the first at or behind its begin to the last before its end.
        low = max(0, -(-(part.offset[dim] - picked.start) // step))
        high = min(len(picked), -(-(part.offset[dim] + part.sizes[dim] - picked.start) // step))
        if low >= high:
            continue
        first = picked.start + low * step - part.offset[dim]
        found.append(
            Part(
                _at(part.offset, dim, low),
                _at(part.sizes, dim, high - low),
                part.source,
                part.start + first * part.strides[dim],
                _at(part.strides, dim, part.strides[dim] * step),
            )
        )
    return MappedTensor.made_of(_at(tuple(tensor.shape), dim, len(picked)), tensor.dtype, found)


def _split_sizes(tensor: MappedTensor, sizes: Sequence[int], dim: int = 0) -> list[MappedTensor]:
    stops = list(itertools.accumulate(sizes))
    return [_slice(tensor, dim, stop - size, stop) for size, stop in zip(sizes, stops)]


def _split(tensor: MappedTensor, size: int, dim: int = 0) -> list[MappedTensor]:
    total = tensor.shape[dim]
    return [_slice(tensor, dim, at, min(at + size, total)) for at in range(0, total, size)]


def _select(tensor: MappedTensor, dim: int, index: int) -> MappedTensor:
    dim %= tensor.ndim
    index %= tensor.shape[dim]
    return _squeeze(_slice(tensor, dim, index, index + 1), dim)


def _unbind(tensor: MappedTensor, dim: int = 0) -> list[MappedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _squeeze(tensor: MappedTensor, dims: int | Sequence[int] | None = None) -> MappedTensor:
    given = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.ndim for dim in given if tensor.shape[dim] == 1}
    return _permuted(tensor, [dim for dim in range(tensor.ndim) if dim not in gone])


def _permuted(tensor: MappedTensor, dims: Sequence[int]) -> MappedTensor:
    """Dims in another order; those left out have size 1."""

    def picked(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    parts = [
        replace(part, offset=picked(part.offset), sizes=picked(part.sizes), strides=picked(part.strides))
        for part in tensor.parts
    ]
    return MappedTensor.made_of(picked(tensor.shape), tensor.dtype, parts)


def _permute(tensor: MappedTensor, dims: Sequence[int]) -> MappedTensor:
    return _permuted(tensor, [dim % tensor.ndim for dim in dims])


def _transpose(tensor: MappedTensor, dim0: int = 0, dim1: int = 1) -> MappedTensor:
    dims = list(range(tensor.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permuted(tensor, dims)


def _t(tensor: MappedTensor) -> MappedTensor:
    return _transpose(tensor, 0, 1) if tensor.ndim == 2 else _unchanged(tensor)


def _unsqueeze(tensor: MappedTensor, dim: int) -> MappedTensor:
    dim %= tensor.ndim + 1

    def widened(values: Sequence[int], new: int) -> tuple[int, ...]:
        return (*values[:dim], new, *values[dim:])

    parts = [
        replace(part, offset=widened(part.offset, 0), sizes=widened(part.sizes, 1), strides=widened(part.strides, 0))
        for part in tensor.parts
    ]
    return MappedTensor.made_of(widened(tensor.shape, 1), tensor.dtype, parts)


def _cat(tensors: Sequence[MappedTensor], dim: int = 0) -> MappedTensor:
    if not all(isinstance(tensor, MappedTensor) for tensor in tensors):
        raise NotAnIndexMapError("values that the conversion creates, in addition to those of the checkpoint")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotAnIndexMapError(f"a single tensor with the dtypes {sorted({str(tensor.dtype) for tensor in tensors})}")
    dim %= tensors[0].ndim
    first = tensors[0].shape
    for tensor in tensors:
        if tensor.ndim != len(first) or any(a != b for at, (a, b) in enumerate(zip(tensor.shape, first)) if at != dim):
            raise ValueError(f"shapes {tuple(first)} and {tuple(tensor.shape)} cannot be joined along dim {dim}")
    parts, at = [], 0
    for tensor in tensors:
        parts += [replace(part, offset=_at(part.offset, dim, part.offset[dim] + at)) for part in tensor.parts]
        at += tensor.shape[dim]
    return MappedTensor.made_of(_at(tuple(first), dim, at), tensors[0].dtype, parts)


def _stack(tensors: Sequence[MappedTensor], dim: int = 0) -> MappedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim % (tensors[0].ndim + 1))


def _view(tensor: MappedTensor, size: Sequence[int]) -> MappedTensor:
    """The same elements, in row-major order, in another shape."""
    known = math.prod(n for n in size if n != -1)
    shape = tuple(tensor.numel() // known if n == -1 else n for n in size)
    parts = list(tensor.parts)
    for low, high, new in _regrouped(tuple(tensor.shape), shape):
        parts = [made for part in parts for made in _view_part(part, tuple(tensor.shape), low, high, new)]
        if len(parts) > _MAX_PARTS:
            raise NotAnIndexMapError(f"more than {_MAX_PARTS} separate parts")
    return MappedTensor.made_of(shape, tensor.dtype, parts)


def _regrouped(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """The shortest runs of dims with equal products, ``(first, stop, new sizes)``, from the last to the first, so that
    earlier dims keep their positions while later ones are replaced."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first, begin = i, j
        left, right = 1, 1
        while True:
            if left <= right and i < len(old):
                left, i = left * old[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                break
            if left == right and i > first and j > begin:
                break
        while i < len(old) and old[i] == 1 and j == len(new):
            i += 1
        while j < len(new) and new[j] == 1 and i == len(old):
            j += 1
        if old[first:i] != new[begin:j]:
            found.append((first, i, new[begin:j]))
    return found[::-1]


def _view_part(part: Part, shape: tuple[int, ...], low: int, high: int, new: tuple[int, ...]) -> Iterator[Part]:
    """A part after dims ``[low, high)`` of a tensor of ``shape`` have become dims of sizes ``new``."""
    strides = row_major(new)
    for begin, length, at, step in _runs(part, shape[low:high], low, high):
        for first, sizes in _blocks(new, begin, begin + length):
            position = sum(index * stride for index, stride in zip(first, strides)) - begin
            yield Part(
                part.offset[:low] + first + part.offset[high:],
                part.sizes[:low] + sizes + part.sizes[high:],
                part.source,
                at + position * step,
                part.strides[:low] + tuple(stride * step for stride in strides) + part.strides[high:],
            )


def _runs(part: Part, shape: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """Dims ``[low, high)`` of a part flattened: ``(first flat index, length, start, stride)`` of evenly strided runs."""
    offset, sizes, strides = part.offset[low:high], part.sizes[low:high], part.strides[low:high]
    flat = row_major(shape)
    inner = len(sizes)  # dims from here on are one run
    length, step = 1, 1
    while inner > 0:
        size, stride = sizes[inner - 1], strides[inner - 1]
        if size > 1:
            whole = all(a == b for a, b in zip(sizes[inner:], shape[inner:]))  # else indices leave gaps
            if not whole or (length > 1 and stride != step * length):
                break
            step = stride if length == 1 else step
            length *= size
        inner -= 1
    base = sum(o * f for o, f in zip(offset, flat))
    for outer in itertools.product(*(range(n) for n in sizes[:inner])):
        shift = sum(i * f for i, f in zip(outer, flat))
        start = part.start + sum(i * s for i, s in zip(outer, strides))
        yield base + shift, length, start, step


def _blocks(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``[begin, end)`` of the row-major flattening as ``(first index, sizes)`` blocks."""
    if not shape:
        return [((), ())] if begin < end else []
    if len(shape) == 1:
        return [((begin,), (end - begin,))] if begin < end else []
    plane = math.prod(shape[1:])
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while begin < end:
        row, inside = divmod(begin, plane)
        whole = (end - begin) // plane if inside == 0 else 0
        if whole:
            found.append(((row, *(0 for _ in shape[1:])), (whole, *shape[1:])))
            begin += whole * plane
            continue
        stop = min(end, (row + 1) * plane)
        for first, sizes in _blocks(shape[1:], inside, stop - row * plane):
            found.append(((row, *first), (1, *sizes)))
        begin = stop
    return found


def _at(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


aten = torch.ops.aten
_OPS: dict[Any, Callable[..., Any]] = {
    aten.slice: _slice,
    aten.narrow: lambda tensor, dim, start, length: _slice(tensor, dim, start, start + length),
    aten.split: _split,
    aten.split_with_sizes: _split_sizes,
    aten.select: _select,
    aten.unbind: _unbind,
    aten.squeeze: _squeeze,
    aten.unsqueeze: _unsqueeze,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _t,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.reshape: _view,
    aten.detach: _unchanged,
    aten.clone: _unchanged,
    aten.alias: _unchanged,
    aten._to_copy: _unchanged,
    aten.contiguous: _unchanged,
}
