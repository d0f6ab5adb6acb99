"""``slice``, ``select``, ``split``, ``unbind`` and their gradients; ``cat``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, make_dtensor, make_spec, no_torch_function, spec_of, stock_dispatch
from vescale.errors import OpPlacementError
from vescale.ops._call import Decision, OpCall, Placements
from vescale.ops._conversion import bring, bring_with_gradient, enter_local, leave_local, share_version
from vescale.ops._registry import OpContext, handles, register_aten, replaces
from vescale.ops._view_copies import remember_copy
from vescale.ops.views import refit_ragged, regions, view_rule
from vescale.placements import (
    InterleavedShard,
    Interval,
    Region,
    contiguous_stride,
    coordinates,
    local_region,
    own_region,
    ragged_axis,
    shard_dim,
    shift_dim,
    without_partials,
)

# Slices of an interleaved dim along its chunks: every rank holds its part of each chunk already.


def chunk_slices(call: OpCall) -> Decision | None:
    """Slices whose bounds are chunk bounds: local views, ``Shard(dim)`` for one chunk and ``InterleavedShard`` for several.

    No communication. None when a bound is within a chunk.
    """
    spec = call.operands[0]
    if spec.ndim == 0 or ragged_axis(spec.placements) is not None:
        return None
    dim = int(call.argument("dim", 0)) % spec.ndim
    if not any(isinstance(p, InterleavedShard) and p.dim == dim for p in spec.placements):
        return None
    ranges = slice_ranges(call, spec.shape[dim])
    if ranges is None:
        return None
    found = [_held(spec, dim, cut) for cut in ranges]
    outputs = [placements for placements in found if placements is not None]
    if len(outputs) < len(ranges):
        return None
    cuts = functools.partial(
        _cut_chunks, spec.mesh, tuple(spec.shape), spec.placements, dim, ranges, call.name == "slice"
    )
    return Decision((spec.placements,), tuple(outputs), cuts)


def slice_ranges(call: OpCall, size: int) -> list[Interval] | None:
    """The index ranges that ``slice``, ``split`` or ``split_with_sizes`` take from a dim of ``size``, one for each result;
    None for a slice with a step."""
    if call.name == "slice":
        start, stop = call.argument("start"), call.argument("end")
        if call.argument("step", 1) != 1:
            return None
        first, last, _ = slice(start, stop).indices(size)
        return [(first, max(first, last))]
    if call.name == "split":
        length = int(call.argument("split_size"))
        return [(start, min(start + length, size)) for start in range(0, size, length)] if length else None
    ranges, start = [], 0
    for length in call.argument("split_sizes"):
        ranges.append((start, start + length))
        start += length
    return ranges


def _held(spec: DTensorSpec, dim: int, cut: Interval) -> Placements | None:
    """The placements that describe, for indices ``cut`` of ``dim``, what each rank holds of them already."""
    if cut == (0, spec.shape[dim]):
        return spec.placements
    shape = (*spec.shape[:dim], cut[1] - cut[0], *spec.shape[dim + 1 :])
    mesh_shape = tuple(spec.mesh.shape)
    most = max(p.num_chunks for p in spec.placements if isinstance(p, InterleavedShard) and p.dim == dim)
    for num_chunks in range(1, most + 1):
        candidate: Placement = Shard(dim) if num_chunks == 1 else InterleavedShard(dim, num_chunks)
        placements = tuple(
            candidate if isinstance(p, InterleavedShard) and p.dim == dim else p for p in spec.placements
        )
        if all(
            _shifted(local_region(spec.shape, spec.placements, mesh_shape, where).intervals[dim], cut)
            == _shifted(local_region(shape, placements, mesh_shape, where).intervals[dim], (0, shape[dim]))
            for where in coordinates(mesh_shape)
        ):
            return placements
    return None


def _shifted(held: Sequence[Interval], cut: Interval) -> list[Interval]:
    """The held ranges within ``cut``, counted from its start; adjacent ones are merged."""
    found: list[Interval] = []
    for start, stop in held:
        low, high = max(start, cut[0]) - cut[0], min(stop, cut[1]) - cut[0]
        if low < high:
            if found and found[-1][1] == low:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
    return found


def _cut_chunks(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    placements: Placements,
    dim: int,
    ranges: Sequence[Interval],
    single: bool,
    local: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    region = own_region(shape, placements, mesh)
    assert region is not None  # only ranks of the mesh run local functions
    held = region.intervals[dim]
    parts = []
    for cut in ranges:
        before = sum(stop - start for start, stop in _shifted(held, (0, cut[0])))
        length = sum(stop - start for start, stop in _shifted(held, cut))
        parts.append(local.narrow(dim, before, length))
    return parts[0] if single else parts


# Rows of a ragged tensor: they are contiguous in its flattening, so every rank holds its part of them already.


def row_slices(call: OpCall) -> Decision | None:
    """``select``, ``slice``, ``split`` and ``unbind`` along dim 0: local views, ragged with the parts of the rows that each
    rank holds.

    No communication. None when another axis shards dim 0, for a step, or when no placement describes the parts.
    """
    spec = call.operands[0]
    if spec.ndim == 0 or ragged_axis(spec.placements) is None or int(call.argument("dim", 0)) % spec.ndim != 0:
        return None
    if any(shard_dim(placement) == 0 for placement in spec.placements):
        return None
    drops_dim = call.name in ("select", "unbind")
    ranges = _single_rows(call, spec.shape[0]) if drops_dim else slice_ranges(call, spec.shape[0])
    if ranges is None:
        return None
    others = [shift_dim(placement, -drops_dim) for placement in spec.placements]
    held = regions(spec)
    outputs, cuts = [], []
    for first, last in ranges:
        shape = spec.shape[1:] if drops_dim else (last - first, *spec.shape[1:])
        parts = [_part(region, first, last) for region in held]
        placements = refit_ragged(spec, shape, others, [run for run, _ in parts])
        if placements is None:
            return None
        outputs.append(placements)
        cuts.append([cut for _, cut in parts])
    single = call.name in ("select", "slice")
    return Decision((spec.placements,), tuple(outputs), functools.partial(_cut, spec.mesh, cuts, single))


def _single_rows(call: OpCall, size: int) -> list[Interval]:
    if call.name == "unbind":
        return [(row, row + 1) for row in range(size)]
    row = int(call.argument("index")) % size
    return [(row, row + 1)]


def _part(region: Region, first: int, last: int) -> tuple[Interval, Interval]:
    """A rank's part of rows ``[first, last)``: as a run of their flattening, and as a slice of the local tensor."""
    assert region.flat is not None
    row = math.prod(region.shape[1:])
    low, high = (min(max(edge, first * row), last * row) for edge in region.flat)
    begin = region.flat[0]
    return (low - first * row, high - first * row), (low - begin, high - begin)


def _cut(
    mesh: DeviceMesh, cuts: Sequence[Sequence[Interval]], single: bool, local: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh run local functions
    where = list(coordinates(mesh.shape)).index(tuple(coordinate))
    parts = [local[cut[where][0] : cut[where][1]] for cut in cuts]
    return parts[0] if single else parts


def slice_rule(call: OpCall) -> Decision | None:
    """Chunks of an interleaved dim, the whole dim, or rows of a ragged tensor."""
    return chunk_slices(call) or view_rule(call) or row_slices(call)


def split_rule(call: OpCall) -> Decision | None:
    """Chunks of an interleaved dim, or rows of a ragged tensor."""
    return chunk_slices(call) or row_slices(call)


def gradient_rule(call: OpCall) -> Decision | None:
    """Gradients of ``slice`` and ``select`` along dims that are not sharded: each rank surrounds its part with zeros."""
    spec, shape = call.operands[0], tuple(call.meta.shape)
    dim = int(call.argument("dim")) % len(shape)
    if ragged_axis(spec.placements) is not None or math.prod(shape) == 0:
        return None
    selects = call.name == "select_backward"
    outputs = tuple(shift_dim(p, 1, start=dim) if selects else p for p in spec.placements)
    if any(shard_dim(placement) == dim for placement in outputs):
        return None
    return Decision((spec.placements,), (outputs,), functools.partial(_gradient, call.op, spec.mesh, shape, outputs))


def _gradient(
    op: Any, mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, local: torch.Tensor, _: Any, *rest: Any
) -> torch.Tensor:
    region = own_region(shape, placements, mesh)
    assert region is not None  # only ranks of the mesh run local functions
    result: torch.Tensor = op(local, region.local_shape, *rest)
    return result


def _counts_from_the_end(op: Any, schema: Any) -> bool:
    return bool(schema.args_schema[2] < 0)


@handles(torch.ops.aten.select_backward.default, applies=_counts_from_the_end)
def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With the dim counted from the first one: PyTorch's rule takes ``-1`` for a dim before all others, and labels the
    gradient of ``x.select(-1, 0)`` as cut along the dim after the one that is cut."""
    grad, sizes, dim, index = args
    return op(grad, sizes, dim + len(sizes), index)


register_aten("slice", rule=slice_rule)
register_aten("split split_with_sizes", rule=split_rule)
register_aten("select unbind", rule=row_slices)
register_aten("slice_backward select_backward", rule=gradient_rule)


# ``split``, ``chunk``, ``unbind`` on DTensors, also where not every part gets a gradient. Along a sharded dim, each
# part is on a few ranks. Equal parts are spread over all ranks by one all-to-all, to :class:`InterleavedShard`, where
# DTensor gathers everything. (A plan can give this placement to the weight that the tensor is computed with; then
# nothing moves.)

_FUNCTIONS = tuple(
    function
    for name in ("split", "chunk", "unbind", "tensor_split", "split_with_sizes")
    for function in (getattr(torch, name), getattr(torch.Tensor, name))
) + (torch.Tensor.__iter__,)
_UNBINDING = (torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__)


class _WholeGradients(torch.autograd.Function):
    """Identity. The gradients of parts without one are DTensors of zeros: PyTorch would make plain tensors of zeros, which
    DTensor cannot concatenate with the others."""

    @staticmethod
    def forward(ctx: Any, *parts: DTensor) -> tuple[DTensor, ...]:
        ctx.specs = [spec_of(part) for part in parts]
        ctx.locals = [local_of(part).new_empty(0) for part in parts]
        ctx.shapes = [local_of(part).shape for part in parts]
        ctx.set_materialize_grads(False)
        return parts  # as views, so that autograd knows of writes to what was split

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[DTensor, ...]:
        with no_torch_function():
            return tuple(
                make_dtensor(like.new_zeros(shape), _whole(spec)) if grad is None else grad
                for grad, spec, like, shape in zip(grads, ctx.specs, ctx.locals, ctx.shapes)
            )


def _whole(spec: Any) -> Any:
    """The spec with Replicate for Partial: a sum of zeros is zero."""
    return make_spec(spec.mesh, without_partials(spec.placements), spec.shape, spec.stride, spec.tensor_meta.dtype)


class _Chunks(torch.autograd.Function):
    """The chunks of an interleaved dim, each of which is sharded over all ranks. Their gradients are concatenated locally;
    PyTorch would concatenate the global tensors, for which DTensor gathers them."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int, *parts: DTensor) -> tuple[DTensor, ...]:
        ctx.spec, ctx.dim, ctx.specs = spec_of(x), dim, [spec_of(part) for part in parts]
        ctx.shapes = [local_of(part).shape for part in parts]
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        like = next(local_of(grad) for grad in grads if grad is not None)
        with no_torch_function():
            found = [
                like.new_zeros(shape)
                if grad is None
                else local_of(bring(grad, without_partials(spec.placements), "split", "gradient"))
                for grad, spec, shape in zip(grads, ctx.specs, ctx.shapes)
            ]
            shape, placements = ctx.spec.shape, without_partials(ctx.spec.placements)
            spec = make_spec(ctx.spec.mesh, placements, shape, contiguous_stride(shape), like.dtype)
            return make_dtensor(torch.cat(found, ctx.dim), spec), None, *(None for _ in grads)


def _interleaved_dim(x: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The dim that is split, if it is interleaved."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = dim % x.ndim if isinstance(dim, int) and x.ndim else -1
    return dim if any(isinstance(p, InterleavedShard) and p.dim == dim for p in x.placements) else None


def _spread(context: OpContext, x: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """``x`` redistributed so that each of the equal parts that it is split into is sharded, if one axis shards the dim."""
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    dim = dim % x.ndim if isinstance(dim, int) and x.ndim else -1
    axes = [axis for axis, p in enumerate(x.placements) if type(p) is Shard and p.dim == dim]
    if len(axes) != 1 or context.mesh.size(axes[0]) == 1:
        return x
    with torch.no_grad():
        shapes = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs)
    if len(shapes) < 2 or len({part.shape[dim] for part in shapes}) > 1:
        return x
    target = list(x.placements)
    target[axes[0]] = InterleavedShard(dim, len(shapes))
    spread = bring_with_gradient(x, target, func.__name__, "self")
    # The parts are views, and writes to them have to reach x.
    remember_copy(local_of(x), spec_of(x), local_of(spread), spec_of(spread))
    share_version(x, spread)
    return spread


def _are_local(x: DTensor, dim: int, parts: tuple[Any, ...]) -> bool:
    """Whether the local tensors of the parts make up the local tensor of ``x``."""
    held = sum(local_of(part).shape[dim] for part in parts)
    return all(len(part.placements) == len(x.placements) for part in parts) and held == local_of(x).shape[dim]


def _is_local(x: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether the local parts are those of the local tensor: the dim that is split is whole on each rank. Autograd makes
    the gradient of a part without one."""
    if not isinstance(x, DTensor) or not all(type(p) is Shard or p.is_replicate() for p in x.placements):
        return False
    dim = kwargs.get("dim", args[-1] if len(args) > 1 else 0)
    return isinstance(dim, int) and bool(x.ndim) and all(shard_dim(p) != dim % x.ndim for p in x.placements)


def _unbinds_locally(x: Any = None, dim: Any = 0) -> bool:
    return _is_local(x, None, dim)


@replaces(*_UNBINDING, is_local=_unbinds_locally, backward="custom")
@replaces(*(f for f in _FUNCTIONS if f not in _UNBINDING), is_local=_is_local, backward="custom")
def split(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, with the gradients and redistributions of this module's description."""
    iterated = func is torch.Tensor.__iter__
    x = args[0] if args else None
    if isinstance(x, DTensor) and func not in _UNBINDING:
        x = _spread(context, x, func, args, kwargs)
        args = (x, *args[1:])
    if isinstance(x, DTensor) and x.requires_grad and torch.is_grad_enabled() and func not in _UNBINDING:
        dim = _interleaved_dim(x, args, kwargs)
        if dim is not None:
            with torch.no_grad():
                parts = tuple(func(*args, **kwargs))
            if _are_local(x, dim, parts):
                with no_torch_function():
                    return _Chunks.apply(x, dim, *parts)
    parts = torch.unbind(args[0]) if iterated else func(*args, **kwargs)
    if parts and all(isinstance(part, DTensor) and part.requires_grad for part in parts):
        with no_torch_function():
            parts = type(parts)(_WholeGradients.apply(*parts))
    return iter(parts) if iterated else parts


# ``torch.cat`` on DTensors.
#
# If tensors of equal shape are sharded alike along the dim of concatenation, the result is an :class:`InterleavedShard`
# of the concatenated local tensors, and nothing moves; DTensor gathers. Tensors of different sizes are gathered here,
# too: no placement describes the concatenation of their shards. Empty 1-D tensors, which torch ignores, have no part in
# either.


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether :func:`_concatenate` does anything but call the function."""
    tensors = _joined(args, kwargs)
    leaves_out = len(tensors) != len(args[0] if args else kwargs["tensors"])
    return leaves_out or _is_single(tensors, kwargs) or _interleaving(tensors, args, kwargs) is not None


@replaces(torch.cat, torch.concat, torch.concatenate, changes=_changes)
def _concatenate(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, without the empty 1-D tensors that torch ignores (a key/value cache starts as one)."""
    joined = _joined(args, kwargs)
    if _is_single(joined, kwargs):
        return joined[0].clone(memory_format=torch.contiguous_format)  # the rule gathers along a sharded dim
    interleaved = _interleaved(joined, args, kwargs)
    if interleaved is not None:
        return interleaved
    if args:
        return func(joined, *args[1:], **kwargs)
    return func(**{**kwargs, "tensors": joined})


def _joined(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What is concatenated, in the dtype of the result if anything is left out: its dtype counts."""
    tensors = list(args[0] if args else kwargs["tensors"])
    joined = [tensor for tensor in tensors if not _is_ignored(tensor.shape)]
    if not joined or len(joined) == len(tensors):
        return tensors
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in joined]


def _is_ignored(shape: Sequence[int]) -> bool:
    return len(shape) == 1 and not shape[0]


def _ignores_some(op: Any, schema: Any) -> bool:
    shapes = [x.shape for x in schema.args_schema[0]]
    return any(map(_is_ignored, shapes)) and not all(map(_is_ignored, shapes))


@handles(torch.ops.aten.cat.default, applies=_ignores_some)
def _without_ignored(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Also outside of a model's forward, as ``generate`` splits and joins caches. PyTorch's rule takes an empty 1-D tensor
    for one with all dims."""
    return stock_dispatch(op, (_joined(args, kwargs), *args[1:]), kwargs)


def _is_single(tensors: list[Any], kwargs: dict[str, Any]) -> bool:
    return len(tensors) == 1 and isinstance(tensors[0], DTensor) and "out" not in kwargs


def _interleaving(tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """(dim of concatenation, mesh axis that shards it) if a placement describes the concatenation of local tensors."""
    first = tensors[0]
    if "out" in kwargs or len(tensors) < 2 or not all(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(dim, int) or not all((t.shape, t.placements) == (first.shape, first.placements) for t in tensors):
        return None
    dim %= first.ndim
    axes = [axis for axis, p in enumerate(first.placements) if type(p) is Shard and p.dim == dim]
    others = (p.is_replicate() or type(p) is Shard for p in first.placements)
    if len(axes) != 1 or not all(others) or first.device_mesh.size(axes[0]) == 1:
        return None
    return dim, axes[0]


def _interleaved(tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """The concatenation of local tensors; None where no placement describes it."""
    found = _interleaving(tensors, args, kwargs)
    if found is None:
        return None
    (dim, axis), first = found, tensors[0]
    placements = list(first.placements)
    placements[axis] = InterleavedShard(dim, len(tensors))
    shape = [*first.shape[:dim], first.shape[dim] * len(tensors), *first.shape[dim + 1 :]]
    local = [enter_local(tensor) for tensor in tensors]
    with no_torch_function():
        return leave_local(torch.cat(local, dim), first.device_mesh, placements, shape, "cat")


# ``stack`` of numbers on several meshes: the norms of gradients that are not all on one mesh.


def stack_rule(call: OpCall) -> Decision | None:
    """``stack`` of replicated numbers on several meshes over the same ranks. Local; the result is on the mesh of the first.

    Raises RuntimeError for meshes of different ranks, some of which lack a number.
    """
    if len({spec.mesh for spec in call.operands}) == 1:
        return None
    if any(math.prod(spec.shape) != 1 or not all(p.is_replicate() for p in spec.placements) for spec in call.operands):
        return None
    first = frozenset(call.mesh.mesh.flatten().tolist())
    other = next((s.mesh for s in call.operands if frozenset(s.mesh.mesh.flatten().tolist()) != first), None)
    if other is not None:
        raise OpPlacementError(
            f"{call.op}: numbers on {call.mesh} and on {other}, which have different ranks; expected meshes over the "
            "same ranks: read the numbers with full_tensor(), and send them to all ranks"
        )
    whole = (Replicate(),) * call.mesh.ndim
    return Decision(tuple(tuple(spec.placements) for spec in call.operands), (whole,), local=call.op)


register_aten("stack", rule=stack_rule)
