"""Computes the values of deferred tensors: whole tensors, or only a rank's part of them.

A part is computed from the same part of its operands through every elementwise op. The result of an op that is not
elementwise (a factorization, a scatter) is computed whole for the moment, and cut. The generators of the process are not
changed: each random op is replayed from its recorded state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.compat.tensor_subclasses import tree_leaves, tree_map
from vescale.errors import MaterializeError
from vescale.placements import Region
from vescale.rng._dtensor_fill import part_of_whole
from vescale.rng._engine import fill_part, fill_region, generator_at
from vescale.rng._random_ops import Fill, RandomOp
from vescale.rng._stream_spans import is_contiguous, stream_order

# The record of ops on tensors that have no values yet: which op writes which storage, in program order.
#
# Every deferred storage has a :class:`Record`, the list of ops that write it. A tensor is a :class:`View` of a record;
# taking a view is not an op. The values of a view at a time are those after all writes before that time. Writes whose values
# are overwritten are dead: a write that fills the whole storage makes all earlier ones dead. A graph is freed with its
# tensors.

aten = torch.ops.aten
_OVERWRITES = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
_CLOCK = itertools.count()


def next_time() -> int:
    """Program order of recorded ops; later is larger."""
    return next(_CLOCK)


@dataclass(eq=False)
class Record:
    """A storage without memory: its size, its device, and the ops that write it, oldest first."""

    num_bytes: int
    device: torch.device
    writes: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """A tensor as the geometry of its view of a record, in elements of its dtype."""

    record: Record
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def covers(self) -> bool:
        """Whether the view contains every element of the storage exactly once."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        dense = is_contiguous([self.shape[dim] for dim in order], [self.strides[dim] for dim in order])
        return dense and self.offset == 0 and self.numel * self.dtype.itemsize == self.record.num_bytes

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor with this geometry on a real storage."""
        tensor: Any = torch.empty(0, dtype=self.dtype, device=storage.device)
        result: torch.Tensor = tensor.set_(storage, self.offset, self.shape, self.strides)
        return result


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor with values that an op reads; its values must not change until the op is replayed."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise MaterializeError(
                f"a tensor of shape {tuple(self.tensor.shape)} was read inside deferred_init() and written to "
                "afterwards, so that its values at that time are lost; expected no writes before materialize(): pass "
                "a clone of it to the constructor"
            )
        return self.tensor


@dataclass(frozen=True)
class Initializer:
    """An initializer that consists of elementwise ops and random fills: ``function(tensor, *arguments, generator)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One recorded op.

    Attributes:
        func, args, kwargs: the call; its tensors are :class:`View` or :class:`Constant`.
        results: the call's tensors in order; None for those that are views of an input.
        written: the inputs that it changes.
        draws: for random fills of ``written[0]``: what is drawn, from a generator in the state ``state``. ``func`` is
            then not called; ``args[1:]`` holds the tensor argument, if any.
    """

    time: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...] = ()
    written: tuple[View, ...] = ()
    draws: RandomOp | Initializer | None = None
    state: bytes = b""

    @property
    def overwrites(self) -> bool:
        """Whether the op ignores the values that ``written`` held before."""
        return self.draws is not None or self.func in _OVERWRITES

    def replaces(self, record: Record) -> bool:
        """Whether the op makes all earlier values of the record dead."""
        if any(result is not None and result.record is record for result in self.results):
            return True
        return self.overwrites and self.written[0].record is record and self.written[0].covers()

    def reads(self) -> Iterator[View]:
        """The views whose values the op uses."""
        leaves = tree_leaves((self.args, self.kwargs))
        for leaf in leaves[1:] if self.overwrites else leaves:
            if isinstance(leaf, View):
                yield leaf


def live_writes(record: Record, time: int) -> list[Op]:
    """The writes before ``time`` on which the values at ``time`` depend directly, oldest first."""
    writes = [op for op in record.writes if op.time < time]
    for index in range(len(writes) - 1, -1, -1):
        if writes[index].replaces(record):
            return writes[index:]
    return writes


def needed_ops(record: Record, time: int) -> list[Op]:
    """All ops on which the values of the record at ``time`` depend, in program order.

    If they run in this order, every storage has the right values whenever one of them reads it: an op that writes other
    values to a storage is followed by the op that overwrites them before they are read.
    """
    found: dict[int, Op] = {}
    seen: set[tuple[int, int]] = set()
    todo = [(record, time)]
    while todo:
        record, time = todo.pop()
        if (id(record), time) in seen:
            continue
        seen.add((id(record), time))
        for op in live_writes(record, time):
            if op.time not in found:
                found[op.time] = op
                todo += [(view.record, op.time) for view in op.reads()]
                # A storage that an op writes in part must have its earlier values. (Those of this record are
                # among its live writes already.)
                partial = (view.record for view in op.written if not op.replaces(view.record))
                todo += [(other, op.time) for other in partial if other is not record]
    return [found[key] for key in sorted(found)]


_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Ops whose result for an element does not depend on the position of the element in memory. Exponentials and powers are not
# among them: their vector kernels and the scalar tails of these round differently.
_EXACT_NAMES = """
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone copy div eq fill floor
    floor_divide ge gt le lift logical_and logical_not logical_or lt masked_fill maximum minimum mul ne neg reciprocal
    remainder round rsub sign sqrt sub _to_copy trunc where zero
"""
_EXACT = frozenset(_EXACT_NAMES.split())
_FACTORIES = {aten.zeros.default, aten.ones.default, aten.full.default, aten.zeros_like.default, aten.ones_like.default}
_FACTORIES |= {aten.full_like.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}


def whole_numel(view: View, time: int) -> int:
    """The number of elements that :func:`whole_values` computes: those of the ops' results, and those written in place."""
    numel = 0
    for op in needed_ops(view.record, time):
        numel += sum(result.numel for result in op.results if result is not None)
        numel += sum(written.numel for written in op.written)
    return numel


def whole_values(view: View, time: int) -> torch.Tensor:
    """The values of a view at a time, in new memory with the view's shape and strides: the recorded ops, replayed."""
    storages: dict[int, torch.UntypedStorage] = {}

    def storage_of(record: Record) -> torch.UntypedStorage:
        if id(record) not in storages:  # its creation is dead: it is overwritten before it is read
            storages[id(record)] = torch.UntypedStorage(record.num_bytes, device=record.device)
        return storages[id(record)]

    def real(leaf: Any) -> Any:
        if isinstance(leaf, View):
            return leaf.on(storage_of(leaf.record))
        return leaf.value() if isinstance(leaf, Constant) else leaf

    with torch.no_grad():
        for op in needed_ops(view.record, time):
            args, kwargs = tree_map(real, op.args), tree_map(real, op.kwargs)
            if op.draws is not None:
                _draw(op, args)
                continue
            outputs = op.func(*args, **kwargs)
            for result, output in zip(op.results, _tensors(outputs), strict=True):
                if result is not None:
                    storages[id(result.record)] = _storage_as_recorded(result, output)
        return view.on(storage_of(view.record))


def _tensors(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _draw(op: Op, args: tuple[Any, ...]) -> None:
    target = args[0]
    generator = generator_at(op.state, target.device)
    if isinstance(op.draws, Initializer):
        op.draws.function(target, *op.draws.arguments, generator)
    else:
        assert op.draws is not None
        op.draws.fill(target, generator, args[1] if len(args) > 1 else None)


def _storage_as_recorded(result: View, output: torch.Tensor) -> torch.UntypedStorage:
    """The storage of an op's output with the recorded strides; a real kernel may choose others than a meta kernel."""
    storage = output.untyped_storage()
    same = output.stride() == result.strides and output.storage_offset() == result.offset
    if same and storage.nbytes() >= result.record.num_bytes:
        return storage
    storage = torch.UntypedStorage(result.record.num_bytes, device=output.device)
    result.on(storage).copy_(output)
    return storage


def part_values(view: View, time: int, region: Region, out: torch.Tensor | None = None) -> torch.Tensor:
    """The region's part of the values of a view at a time, with the shape of its local tensor. In new memory, or in ``out``
    (of that shape and dtype, contiguous) if nothing is computed whole.

    Memory: the part, and the whole results of ops that are not elementwise. Communication: none.
    """
    with torch.no_grad():
        return _part(view, time, region, out)


def _part(view: View, time: int, region: Region, out: torch.Tensor | None = None) -> torch.Tensor:
    if region.flat is None and region.local_shape == region.global_shape:
        return whole_values(view, time)
    base = _base(view, time)
    if base is not None:
        mapped = _into(view, base, region)
        if mapped is not None:
            local = _replay_part(base, live_writes(view.record, time), mapped, out)
            if local is not None:
                return local if local is out else local.view(region.local_shape)
    whole = whole_values(view, time)
    part = part_of_whole(whole, region)
    return part.clone() if part.untyped_storage().nbytes() != part.numel() * part.itemsize else part


def _base(view: View, time: int) -> View | None:
    """The tensor that created the view's storage, if it is row-major and covers the storage."""
    writes = live_writes(view.record, time)
    created = [result for op in view.record.writes[:1] for result in op.results if result is not None]
    base = next((result for result in created if result.record is view.record), None)
    if not writes or base is None or not base.covers() or base.dtype != view.dtype:
        return None
    return base if is_contiguous(base.shape, base.strides) or base == view else None


def _into(view: View, base: View, region: Region) -> Region | None:
    """The same elements as a region of the base tensor; None if they are not a product of ranges."""
    if view == base:
        return region
    box = _box(view, base)
    if box is None or region.flat is not None:
        return None
    starts, dims = box
    intervals = [((start, start + 1),) for start in starts]
    for dim, ranges in zip(dims, region.intervals, strict=True):
        if dim is not None:
            intervals[dim] = tuple((starts[dim] + low, starts[dim] + high) for low, high in ranges)  # type: ignore[assignment]
        elif ranges != ((0, 1),):
            return None  # a dim of size 1 that this rank holds nothing of
    return Region(base.shape, tuple(intervals))


def _box(view: View, base: View) -> tuple[list[int], list[int | None]] | None:
    """A view as a block of a row-major base: the block's start, and the base's dim for each dim of the view.

    None for other views (transposed, strided, expanded). Dims of size 1 may have no base dim.
    """
    starts, rest = [], view.offset
    for size, stride in zip(base.shape, base.strides, strict=True):
        index = rest // stride if size else 0
        starts.append(index)
        rest -= index * stride
    dims: list[int | None] = []
    following = 0
    for size, stride in zip(view.shape, view.strides, strict=True):
        found = None
        for dim in range(following, len(base.shape)):
            if base.strides[dim] == stride and starts[dim] + size <= base.shape[dim] and base.shape[dim] > 1:
                found = dim
                break
        if found is None and size != 1:
            return None
        dims.append(found)
        following = following if found is None else found + 1
    return starts, dims


def _replay_part(base: View, writes: list[Op], region: Region, out: torch.Tensor | None = None) -> torch.Tensor | None:
    """Replay the writes of one storage on its part of the base tensor; None if one of them is not elementwise."""
    local: torch.Tensor | None = None
    for op in writes:
        if any(result is not None and result.record is base.record for result in op.results):
            local = _create(op, base, region, out)
        elif local is None and op.overwrites:  # the first live write: earlier values are dead
            local = _allocate(base, region, out)
        if local is None or (op.written and not _write(op, base, local, region)):
            return None
    return local


def _allocate(base: View, region: Region, out: torch.Tensor | None = None) -> torch.Tensor:
    """Uninitialized memory for a part, in the memory order of the whole: ``out`` where the part is flat."""
    if region.flat is not None:
        if out is not None and out.shape == region.local_shape and out.device == base.record.device:
            return out
        return torch.empty(region.local_shape, dtype=base.dtype, device=base.record.device)
    order = stream_order(base.shape, base.strides)
    in_order = torch.empty([region.shape[dim] for dim in order], dtype=base.dtype, device=base.record.device)
    return in_order.permute(sorted(range(len(order)), key=order.__getitem__))


def _create(op: Op, base: View, region: Region, out: torch.Tensor | None = None) -> torch.Tensor | None:
    if op.func in _EMPTY:
        return _allocate(base, region, out)
    if op.func in _FACTORIES:
        fill = {aten.zeros: 0, aten.zeros_like: 0, aten.new_zeros: 0, aten.ones: 1, aten.ones_like: 1, aten.new_ones: 1}
        packet = op.func.overloadpacket
        value = fill[packet] if packet in fill else op.kwargs.get("fill_value", op.args[-1])
        return _allocate(base, region, out).fill_(value)
    if len(op.results) != 1 or not _is_exact(op):
        return None
    args = _operands(op, op.args, base.shape, region)
    kwargs = _operands(op, op.kwargs, base.shape, region)
    if args is None or kwargs is None:
        return None
    output: torch.Tensor = op.func(*args, **kwargs)
    return _allocate(base, region, out).copy_(output) if output.shape == region.local_shape else None


def _is_exact(op: Op) -> bool:
    name = op.func._schema.name.removeprefix("aten::").removesuffix("_")
    return name in _EXACT and op.kwargs.get("alpha", 1) == 1  # multiply-adds are fused or not, by vector width


def _write(op: Op, base: View, local: torch.Tensor, region: Region) -> bool:
    """Apply an in-place op to the part of its target in the region. False: the op is not elementwise."""
    target = op.written[0]
    if len(op.written) != 1 or op.args[:1] != (target,) or (op.draws is None and not _is_exact(op)):
        return False
    if any(view.record is base.record for view in [*_views(op.args[1:]), *_views(op.kwargs)]):
        return False  # reads its own storage under another geometry
    for view, piece, piece_region in _pieces(target, base, local, region):
        if view is None:
            return False
        if isinstance(op.draws, Initializer):
            generator = generator_at(op.state, piece.device)
            fill_part(op.draws.function, op.draws.arguments, piece, piece_region, view.strides, generator)
        elif isinstance(op.draws, RandomOp):
            parameter = _operands(op, op.args[1:], view.shape, piece_region)
            if parameter is None:
                return False
            tensor = parameter[0].expand(piece.shape) if parameter else None
            fill = Fill(op.draws, piece_region, view.strides)
            fill_region(piece, fill, generator_at(op.state, piece.device), tensor)
        else:
            rest = _operands(op, op.args[1:], view.shape, piece_region)
            kwargs = _operands(op, op.kwargs, view.shape, piece_region)
            if rest is None or kwargs is None:
                return False
            op.func(piece, *rest, **kwargs)
    return True


def _pieces(
    target: View, base: View, local: torch.Tensor, region: Region
) -> Sequence[tuple[View | None, torch.Tensor, Region]]:
    """The parts of ``local`` that a write to ``target`` changes: (target, view of local, region of the target)."""
    if target == base:
        return [(target, local, region)]
    box = _box(target, base) if target.dtype == base.dtype and is_contiguous(base.shape, base.strides) else None
    if box is None:
        return [(None, local, region)]
    starts, dims = box
    sizes = [1] * len(base.shape)
    for dim, size in zip(dims, target.shape, strict=True):
        if dim is not None:
            sizes[dim] = size
    found: list[tuple[View | None, torch.Tensor, Region]] = []
    for held in region.boxes:
        low = [max(a, b) for a, b in zip(held.offset, starts, strict=True)]
        high = [min(a + m, b + n) for a, m, b, n in zip(held.offset, held.sizes, starts, sizes, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        piece = held.view(local)
        for dim, (a, b) in enumerate(zip(low, high, strict=True)):
            piece = piece.narrow(dim, a - held.offset[dim], b - a)
        ranges = [((low[d] - starts[d], high[d] - starts[d]),) if d is not None else ((0, 1),) for d in dims]
        kept = [d for d in dims if d is not None]
        for dim in reversed(range(len(base.shape))):
            if dim not in kept:
                piece = piece.squeeze(dim)
        for position, dim_ in enumerate(dims):
            if dim_ is None:
                piece = piece.unsqueeze(position)
        found.append((target, piece, Region(target.shape, tuple(ranges))))
    return found


def _views(tree: Any) -> list[View]:
    found: list[View] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, View) else None, tree)
    return found


def _operands(op: Op, tree: Any, shape: tuple[int, ...], region: Region) -> Any:
    """The operands of an elementwise op on a region of its result: each tensor's own part. None: they have no such parts."""
    impossible = False

    def part(leaf: Any) -> Any:
        nonlocal impossible
        if not isinstance(leaf, View | Constant):
            return leaf
        tensor_shape = leaf.shape if isinstance(leaf, View) else tuple(leaf.tensor.shape)
        if math.prod(tensor_shape) == 1 and len(tensor_shape) <= len(region.local_shape):
            return whole_values(leaf, op.time) if isinstance(leaf, View) else leaf.value()
        own = _broadcast(tensor_shape, shape, region)
        if own is None:
            impossible = True
            return None
        return _part(leaf, op.time, own) if isinstance(leaf, View) else part_of_whole(leaf.value(), own)

    mapped = tree_map(part, tree)
    return None if impossible else mapped


def _broadcast(shape: tuple[int, ...], to: tuple[int, ...], region: Region) -> Region | None:
    """The region of an operand of ``shape`` that a region of the broadcast result ``to`` needs."""
    if shape == to:
        return region
    if region.flat is not None or len(shape) > len(to):
        return None
    skipped = len(to) - len(shape)
    intervals = tuple(
        ((0, 1),) if size == 1 else ranges for size, ranges in zip(shape, region.intervals[skipped:], strict=True)
    )
    return Region(shape, intervals)
