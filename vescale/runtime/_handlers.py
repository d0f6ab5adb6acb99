"""Ops that stock DTensor lacks, for the models that vescale runs; installed with DTensor's dispatcher once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import HASHES_OF_CHECKED_MESHES, called_by_user, describe_graphs, follows_graphs, step_checks
from vescale.comm import note_write, record
from vescale.compat import (
    DispatchListener,
    DTensorSpec,
    ModelHooks,
    OpHandler,
    OutputSharding,
    install_part,
    is_view,
    local_of,
    make_dtensor,
    make_spec,
    map_tensors,
    no_torch_function,
    output_meta,
    schema_of,
    spec_of,
    stock_dispatch,
    tensors_in,
    with_out_variants,
)
from vescale.compat.random_ops import correct_inplace_view
from vescale.errors import OpPlacementError, PendingSumWarning
from vescale.ops import (
    LIVE_COPIES,
    bring,
    entries,
    is_foreach,
    misjudged_view,
    note_local,
    remember_copy,
    report_implicit_move,
    require_current,
    run_interleaved,
    run_op,
    running_module,
    view_of_uneven_shards,
    wrap_global,
    write_back,
    write_through,
)
from vescale.placements import contiguous_stride, is_pending, stride_like, without_partials
from vescale.runtime._activation import current_activation
from vescale.runtime._adapters import AdapterWatch
from vescale.runtime._foreign_tools import refuse_export
from vescale.runtime._gradient_hooks import refuse_derivatives
from vescale.runtime._input_checks import check_move, check_read, note_draw, note_plain_value
from vescale.runtime._module_calls import checkpointed, in_backward_of
from vescale.runtime._plain_operands import run_mixed
from vescale.runtime._stray_parameters import StrayWatch

# ``x.transpose_(0, 1)``, ``x.squeeze_()`` and the like: another look at the same elements, written onto ``x`` itself.
# Stock DTensor has no rule for most of them, and lets ``squeeze_`` change the local tensor only: the DTensor keeps its
# shape.

_aten = torch.ops.aten
_OUT_OF_PLACE = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_torch_function():
        view = _OUT_OF_PLACE[op](*args, **kwargs)
        return correct_inplace_view(op, args, kwargs, local_of(view), spec_of(view))


INPLACE_VIEW_HANDLERS = dict.fromkeys(_OUT_OF_PLACE, _in_place)


# Ops that are linear in a pending sum, and stay local: ``where`` on sums, ``index_put`` that accumulates, and
# derivatives of activation functions. Stock DTensor reduces a Partial operand of the first and the last, and gathers
# the sharded values of the second: the gradients of a mask's bias, of a table indexed with a sharded batch, and of what
# conditions a sharded sequence (timesteps and classes of a diffusion model).

# Linear in the gradient, their first operand, which has the shape of all others. Stock DTensor has rules for these ...
_DERIVATIVES = frozenset(
    f"aten::{name}_backward" for name in ("gelu", "logit", "native_dropout", "sigmoid", "silu", "tanh", "threshold")
)


# ... and none for these, or (softplus) one that gets the order of the result's dims in memory wrong, so that views fail.
_UNRULED = "elu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish softplus softshrink"


def derivative(op: Any, schema: Any, stock: OutputSharding) -> OutputSharding | None:
    """The placements of the derivative of an activation function for a gradient that is a pending sum: it is one, too, if
    the other operands are replicated. None for other calls and other placements of the operands."""
    grad = schema.args_schema[0]
    if op._schema.name not in _DERIVATIVES or not isinstance(grad, DTensorSpec):
        return None
    others = [spec for spec in schema.args_schema[1:] if isinstance(spec, DTensorSpec)]
    for axis, own in enumerate(grad.placements):
        linear = is_pending(own, "sum", "avg")
        if any(spec.placements[axis] != (Replicate() if linear else own) for spec in others):
            return None
    result: Any = stock.output_spec
    return OutputSharding(DTensorSpec(grad.mesh, grad.placements, tensor_meta=result.tensor_meta))


def _unruled_derivative(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """The derivative of an activation function of elements, as in :func:`derivative`; other operands are redistributed to
    the placements of the first one, the activation's input."""
    grad, *others = (x for x in args if isinstance(x, torch.Tensor))
    mesh = next(x for x in (grad, *others) if isinstance(x, DTensor)).device_mesh
    own = others[0].placements if isinstance(others[0], DTensor) else (Replicate(),) * mesh.ndim
    arriving = grad.placements if isinstance(grad, DTensor) else (Replicate(),) * mesh.ndim
    target = [
        g if p.is_replicate() and is_pending(g, "sum", "avg") else r
        for g, p, r in zip(arriving, own, without_partials(own))
    ]
    wanted = {id(x): [t if x is grad or not t.is_partial() else Replicate() for t in target] for x in (grad, *others)}
    with no_torch_function():
        local = op(
            *(_part(x, mesh, wanted[id(x)], str(op), "operand") if id(x) in wanted else x for x in args), **kwargs
        )
        spec = make_spec(mesh, target, grad.shape, stride_like(local, grad.shape), local.dtype)
        return make_dtensor(local, spec)


DERIVATIVE_HANDLERS = {
    getattr(torch.ops.aten, f"{name}_backward").default: _unruled_derivative for name in _UNRULED.split()
}


def where(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``where(condition, x, y)`` is linear in x and y: with a pending sum among them, each rank chooses in its summand."""
    operands = [x for x in args if isinstance(x, DTensor)]
    if len(args) != 3 or not any(is_pending(p, "sum") for x in operands for p in x.placements):
        return stock_dispatch(op, args, kwargs)
    mesh = operands[0].device_mesh
    shape = torch.broadcast_shapes(*(x.shape for x in args))
    out = [_where_placement(args, axis, shape) for axis in range(mesh.ndim)]
    if any(placement is None for placement in out):
        return stock_dispatch(op, args, kwargs)
    with no_torch_function():
        parts = []
        for position, x in enumerate(args):
            target = [_of_operand(x, placement, shape, position > 0) for placement in out if placement is not None]
            parts.append(_part(x, mesh, target, str(op), op._schema.arguments[position].name))
        return _made(op(*parts), mesh, [p for p in out if p is not None], shape)


def _where_placement(args: Sequence[torch.Tensor], axis: int, shape: Sequence[int]) -> Placement | None:
    """The placement of the result on an axis; None if those of its operands differ."""
    found: set[Placement] = set()
    for position, x in enumerate(args):
        own = x.placements[axis] if isinstance(x, DTensor) else Replicate()
        if own.is_replicate():
            continue
        if type(own) is Shard:
            found.add(Shard(own.dim - x.ndim + len(shape)))
        elif is_pending(own, "sum") and position:
            found.add(Partial())
        else:
            return None
    return found.pop() if len(found) == 1 else None if found else Replicate()


def _of_operand(x: torch.Tensor, out: Placement, shape: Sequence[int], summed: bool) -> Placement:
    """What an operand must be for a result that is ``out``, as broadcasting goes."""
    if out.is_partial():
        return out if summed else Replicate()
    if isinstance(out, Shard):
        dim = out.dim - len(shape) + x.ndim
        return Shard(dim) if dim >= 0 and x.shape[dim] == shape[out.dim] else Replicate()
    return out


def accumulated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """``x.index_put(indices, values, accumulate=True)``: the values that each rank adds are a term of a sum; values that
    are sharded on a dim that is not indexed shard the result. None for other calls and other placements of the operands."""
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    plain = not isinstance(values, DTensor) or any(index is None for index in indices)
    if op is not torch.ops.aten.index_put.default or not accumulate or plain:
        return None
    if all(p.is_replicate() for p in values.placements):
        return None
    mesh, num_indexed = values.device_mesh, len(indices)
    num_leading = max(index.ndim for index in indices)
    if values.ndim != num_leading + x.ndim - num_indexed:
        return None  # values that are broadcast
    out: list[Placement] = []
    for axis, own in enumerate(values.placements):
        placed = x.placements[axis] if isinstance(x, DTensor) else Replicate()
        if own.is_replicate() and placed.is_replicate():
            out.append(Replicate())
        elif is_pending(own, "sum") or (type(own) is Shard and own.dim < num_leading):
            out.append(Partial())
        elif type(own) is Shard:
            out.append(Shard(own.dim - num_leading + num_indexed))
        else:
            return None
        if placed not in (Replicate(), out[-1]):
            return None

    def of_index(index: torch.Tensor) -> list[Placement]:
        found: list[Placement] = []
        for own in values.placements:
            dim = own.dim - num_leading + index.ndim if type(own) is Shard and own.dim < num_leading else -1
            is_cut = dim >= 0 and type(own) is Shard and index.shape[dim] == values.shape[own.dim]
            found.append(Shard(dim) if is_cut else Replicate())
        return found

    with no_torch_function():
        local = _part(x, mesh, out, str(op), "self")
        chosen = [_part(index, mesh, of_index(index), str(op), "indices") for index in indices]
        return _made(op(local, chosen, local_of(values), True), mesh, out, x.shape)


def _part(x: torch.Tensor, mesh: DeviceMesh, target: Sequence[Placement], op: str, operand: str) -> torch.Tensor:
    """This rank's part of an operand; a plain tensor is the same on every rank."""
    if not isinstance(x, DTensor):
        spec = make_spec(mesh, (Replicate(),) * mesh.ndim, x.shape, x.stride(), x.dtype)
        x = make_dtensor(x, spec)
    return local_of(bring(x, target, op, operand))


def _made(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return make_dtensor(local, make_spec(mesh, placements, shape, contiguous_stride(shape), local.dtype))


def install_handlers() -> None:
    """Teach DTensor's dispatcher; idempotent. Ops without a handler, and DTensors of other code, are not affected."""
    own = {
        _aten.as_strided.default: OpHandler(_as_strided),
        _aten.fill_.Tensor: OpHandler(_fill, takes_plain=True),
        _aten.fill_.Scalar: OpHandler(_fill, _is_pending),
        _aten.index_put.default: OpHandler(_index_put, takes_plain=True),
        _aten.index_put_.default: OpHandler(_index_put, takes_plain=True),
        _aten.clone.default: OpHandler(_clone, _is_pending),
        _aten.masked_fill_.Scalar: OpHandler(_masked_fill, _is_pending),
        _aten.where.self: OpHandler(where, _is_pending),
    }
    for op, entry in entries().items():
        if entry.handler is not None:
            applies = entry.applies or (lambda op, schema: True)
            own[op] = OpHandler(entry.handler, applies, bool(entry.takes_plain))
    own.update((op, OpHandler(handler)) for op, handler in INPLACE_VIEW_HANDLERS.items())
    own.update((op, OpHandler(handler, takes_plain=True)) for op, handler in DERIVATIVE_HANDLERS.items())
    install_part(
        "models",
        ModelHooks(
            with_out_variants(own),
            _Listener(),
            LIVE_COPIES,
            checkpointed,
            in_backward_of,
            StrayWatch(AdapterWatch()),
        ),
    )


def _is_pending(op: Any, schema: Any) -> bool:
    """Whether an operand is Partial on an axis."""
    specs = (x for x in schema.args_schema if isinstance(x, DTensorSpec))
    return any(p.is_partial() for spec in specs for p in spec.placements)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.fill_(number)``, what ``x[index] = number`` comes to, too. On a Partial x, one rank holds the value."""
    x, value = args
    with no_torch_function():
        if isinstance(value, DTensor):
            value = local_of(bring(value, (Replicate(),) * value.device_mesh.ndim, str(op), "value"))
        if not isinstance(x, DTensor):
            return op(x, value)
        local_of(x).fill_(value)
        coordinate = x.device_mesh.get_coordinate() or ()
        if any(p.is_partial() and not is_pending(p, "sum", "avg", "max", "min") for p in x.placements):
            whole = [Replicate() if p.is_partial() else p for p in x.placements]
            write_back(x, local_of(x), make_spec(x.device_mesh, whole, x.shape, x.stride(), x.dtype))
            return x
        if any(is_pending(p, "sum") and index for p, index in zip(x.placements, coordinate)):
            local_of(x).zero_()
    return x


def _as_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Strides count in the global tensor: a view of all of it (``fill_diagonal_``), which stock DTensor refuses."""
    x, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    if tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and not offset:
        return _aten.alias.default(x)
    whole = make_spec(x.device_mesh, (Replicate(),) * x.device_mesh.ndim, x.shape, x.stride(), x.dtype)
    with no_torch_function():
        local = local_of(bring(x, whole.placements, str(op), "self"))
        if local.stride() != x.stride():
            local = local.new_empty_strided(x.shape, x.stride()).copy_(local)
        remember_copy(local_of(x), spec_of(x), local, whole)
        viewed = local.as_strided(size, stride, local.storage_offset() + (offset or 0))
        return make_dtensor(viewed, make_spec(whole.mesh, whole.placements, viewed.shape, viewed.stride(), x.dtype))


def _index_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values may be plain, the same on every rank: the backward of ``x[positions] = values`` puts plain zeros there. So may
    be positions, outside of a model: those of ``out[labels != -100]``."""
    found = accumulated(op, args, kwargs)
    if found is not None:
        return found
    x, indices, values, *more = args
    if not isinstance(x, DTensor) or running_module() is None:
        result = run_mixed(op, args, kwargs)
        if result is not NotImplemented:
            return result
    # DTensor's rule takes a mask for one of rows.
    if isinstance(x, DTensor) and any(type(p) is Shard and p.dim for p in x.placements):
        indices = [part for index in indices for part in _positions(index)]
    if isinstance(x, DTensor) and not isinstance(values, DTensor):
        values = wrap_global(values, x.device_mesh, (Replicate(),) * x.device_mesh.ndim, str(op))
    return stock_dispatch(op, (x, indices, values, *more), kwargs)


def _positions(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    return index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else (index,)


def _clone(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSharding:
    """A copy of each rank's part; stock DTensor reduces a Partial tensor to copy it."""
    spec = spec_of(args[0])
    meta: Any = output_meta(op, (spec,), kwargs, None)
    return OutputSharding(make_spec(spec.mesh, spec.placements, meta.shape, meta.stride, meta.dtype))


def _masked_fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros may be filled into a pending sum: on every rank. (Label smoothing does, over sharded classes.)"""
    x, mask, value = args
    pending = [is_pending(p, "sum", "avg") for p in x.placements] if isinstance(x, DTensor) else []
    if not any(pending) or value != 0 or not isinstance(mask, DTensor) or mask.shape != x.shape:
        return stock_dispatch(op, args, kwargs)
    wanted = [Replicate() if reduced_later else p for reduced_later, p in zip(pending, x.placements)]
    with no_torch_function():
        local_of(x).masked_fill_(local_of(bring(mask, wanted, str(op), "mask")), value)
    return x


class _Listener(DispatchListener):
    hashes_of_checked_meshes = HASHES_OF_CHECKED_MESHES

    def redistribution(self, op: Any, moves: Sequence[tuple[int, torch.Tensor, Any, Any]]) -> None:
        if running_module() is None:
            for _, _, source, target in moves:
                check_move(source, target.placements, f"an operand of {op}")
            return
        names = [argument.name for argument in op._schema.arguments]
        for position, local, source, target in moves:
            name = names[position] if position < len(names) else f"argument {position}"
            report_implicit_move(str(op), name, local, source.placements, target.placements)
            _enter_in_ledger(str(op), local, source, target)

    def placement_move(self, op: Any, operand: str, local: torch.Tensor, source: Any, target: Any) -> None:
        report_implicit_move(str(op), operand, local, source.placements, target.placements)

    def viewed_copies(self, op: Any, moves: Sequence[tuple[torch.Tensor, Any, torch.Tensor, Any]]) -> None:
        for local, source, copy, target in moves:
            remember_copy(local, source, copy, target)

    def requires_current(self, tensor: DTensor) -> None:
        require_current(tensor)

    def hands_out(self, tensor: DTensor) -> None:
        if current_activation() is not None:
            note_local(tensor)

    def hands_out_summand(self, tensor: DTensor) -> None:
        """Tell scripts and libraries that read an output; code in a forward computes with summands on purpose."""
        if current_activation() is None and hash(tensor.device_mesh) in HASHES_OF_CHECKED_MESHES and called_by_user(3):
            warnings.warn(
                f"to_local() of a DTensor of shape {tuple(tensor.shape)} placed as {tuple(tensor.placements)}, a pending "
                "sum, is this rank's summand, and no value: x.full_tensor() is the value on every rank; or have the model "
                "return whole tensors, by the entry `<out>: R` of the plan",
                PendingSumWarning,
                stacklevel=3,
            )

    def wrote(self, tensor: DTensor) -> None:
        write_through(tensor, sees_reads=current_activation() is not None)

    def reads(self, tensor: DTensor, how: str, for_python: bool) -> None:
        if step_checks(tensor.device_mesh) is None:
            return
        if for_python or running_module() is None:  # inside of a forward, the model's own ops run on all ranks
            check_read(tensor, how)

    def exports(self, tool: str, model: Any) -> None:
        refuse_export(tool, model)

    def begins_backward(self, losses: Sequence[Any], gradients: Sequence[Any], creates_graph: bool) -> None:
        if follows_graphs() and running_module() is None:
            describe_graphs(losses, gradients, creates_graph=creates_graph)

    def recorded_backward(self, losses: Sequence[Any]) -> None:
        refuse_derivatives(losses)

    def moves(self, tensor: DTensor, placements: tuple[Any, ...], how: str) -> None:
        if step_checks(tensor.device_mesh) is not None:
            check_move(spec_of(tensor), placements, how)

    def draws(self, spec: DTensorSpec, what: str, generator: torch.Generator | None) -> None:
        note_draw(spec, what, generator)

    def plain_value(self, op: Any, name: str, tensor: torch.Tensor, mesh: Any) -> None:
        note_plain_value(str(op), name, tensor, mesh)

    def mixed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_collective(op, args)
        return run_mixed(op, args, kwargs)

    def interleaved(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
        return run_interleaved(args, kwargs, schema)

    def view_of_uneven_shards(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any], schema: Any) -> Any:
        return view_of_uneven_shards(args, kwargs, schema)

    def misjudged_view(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any], schema: Any, sharding: Any) -> Any:
        return misjudged_view(args, kwargs, schema, sharding)

    def moves_nothing(self, op: Any, schema: Any, sharding: Any) -> Any:
        return derivative(op, schema, sharding)

    def plain_operand(self, op: Any, tensor: torch.Tensor) -> bool:
        """In backward too: the zeros that stand for outputs of ``split`` without a gradient are plain."""
        if op._schema.name.startswith("c10d::"):
            raise OpPlacementError(
                f"the script calls the collective {_collective(op)} with a DTensor and plain tensors. {_ARE_GLOBAL}"
            )
        return running_module() is not None

    def no_strategy(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, run on every rank, keep this rank's part of what was written in place; each index of lists by itself, as
        on vescale's placements."""
        if is_foreach(op):
            return run_op(op, args, kwargs, schema_of(op, args, kwargs))
        _refuse_collective(op, args)
        if running_module() is None:
            return _outside(op, args, kwargs)
        return _replicated(op, args, kwargs)


def _outside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same outside of a model, on the mesh of one: all ranks read what is cut."""
    found = [x for x in (*tensors_in(args), *tensors_in(kwargs)) if isinstance(x, DTensor)]
    if not found or step_checks(found[0].device_mesh) is None:
        return NotImplemented
    for x in found:
        check_read(x, f"an operand of {op}")
    return _replicated(op, args, kwargs)


def _refuse_collective(op: Any, args: tuple[Any, ...]) -> None:
    """``dist.all_reduce(loss)``: a DTensor is the global tensor, of which a collective would make a multiple."""
    if not op._schema.name.startswith("c10d::"):
        return
    found = next((x for x in tensors_in(args) if isinstance(x, DTensor)), None)
    if found is not None and step_checks(found.device_mesh) is not None:
        raise OpPlacementError(
            f"the script calls the collective {_collective(op)} on a DTensor of shape {tuple(found.shape)} placed as "
            f"{tuple(found.placements)}. {_ARE_GLOBAL}"
        ) from None


def _collective(op: Any) -> str:
    return str(op._schema.name).removeprefix("c10d::").rstrip("_")


_ARE_GLOBAL = (
    "Outputs, losses and gradients of a parallelized model are global already: leave the collective out, and any division "
    "by the number of ranks. x.full_tensor() is the whole value, x.to_local() this rank's part. Wrappers that broadcast "
    "parameters (DistributedDataParallel around a larger module, ZeroRedundancyOptimizer) are not needed: put all of the "
    "module into the plan, and use the optimizer as it is"
)


def _enter_in_ledger(op: str, local: torch.Tensor, source: Any, target: Any) -> None:
    """DTensor communicates by itself here; say what, axis by axis, with the bytes of the usual algorithm."""
    mesh, size = source.mesh, local.numel() * local.element_size()
    for axis, (before, after) in enumerate(zip(source.placements, target.placements)):
        num_ranks = mesh.size(axis)
        if num_ranks == 1 or before == after or before.is_replicate() or (after.is_partial() and before.is_shard()):
            continue
        if before.is_partial():
            kind, moved = ("all_reduce", 2) if after.is_replicate() else ("reduce_scatter_v", 1)
            moved = moved * size * (num_ranks - 1) // num_ranks
        elif after.is_replicate():
            kind, moved = "all_gather_v", size * (num_ranks - 1)
        else:
            kind, moved = "all_to_all_v", size * (num_ranks - 1) // num_ranks
        record(kind, num_ranks, moved, requester=f"implicit: {op}", group=mesh.get_group(axis))


def _replicated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any op without a rule of its own: correct on every mesh, at the price of gathering its operands."""
    found = [x for x in (*args, *kwargs.values()) for x in (x if isinstance(x, list | tuple) else (x,))]
    mesh = next(x for x in found if isinstance(x, DTensor)).device_mesh
    whole = (Replicate(),) * mesh.ndim

    def whole_part(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        gathered = bring(x, whole, str(op), None)
        if is_view(op):
            remember_copy(local_of(x), spec_of(x), local_of(gathered), spec_of(gathered))
        return local_of(gathered)

    def wrapped(x: torch.Tensor) -> DTensor:
        return make_dtensor(x, make_spec(mesh, whole, x.shape, x.stride(), x.dtype))

    with no_torch_function():
        new_args, new_kwargs = map_tensors(whole_part, tuple(args)), map_tensors(whole_part, dict(kwargs))
        result = op(*new_args, **new_kwargs)
        written = None
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs[argument.name]
                copies = new_args[position] if position < len(args) else new_kwargs[argument.name]
                for old, new in zip(tensors_in(written), tensors_in(copies)):
                    if isinstance(old, DTensor):
                        note_write(new)  # which may be what a collective gave, and is kept
                        write_back(old, new, make_spec(mesh, whole, old.shape, old.stride(), old.dtype))
                        write_through(old, sees_reads=current_activation() is not None)
        if not op._schema.returns:
            return None
        return written if written is not None else map_tensors(wrapped, result)
