"""Runs an op by a decision: operands are moved, something runs on the local tensors, results become DTensors."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale.compat import (
    DTensorSpec,
    has_results,
    is_installed,
    is_view,
    local_of,
    make_dtensor,
    make_spec,
    observe_redistribution,
    rank_in_mesh,
    replace_parts,
    spec_of,
    tell_move,
    with_aliasing,
)
from vescale.errors import OpPlacementError
from vescale.ops._call import OpCall, placements_text, substitute, with_placements
from vescale.ops._decide import cached, output_specs
from vescale.ops._decision import Decision
from vescale.ops._fallback import report_fallback
from vescale.ops._view_copies import remember_copy
from vescale.placements import CustomPlacement, has_custom, is_pending, move_local

__all__ = ["assigning", "execute", "write_back"]

# Whether this thread runs an assignment to items of a DTensor: views must not become copies then.
_ASSIGNING = threading.local()


@contextlib.contextmanager
def assigning() -> Iterator[None]:
    """While the context is open, a view that would have to be a copy raises RuntimeError: a write to it would be lost."""
    before = getattr(_ASSIGNING, "now", False)
    _ASSIGNING.now = True
    try:
        yield
    finally:
        _ASSIGNING.now = before


def execute(call: OpCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the op, with DTensors among ``args`` and ``kwargs``. Communication: what ``decision`` moves."""
    tensors = _tensors(args, kwargs)
    moves = [
        (index, spec, with_placements(spec, wanted))
        for index, (spec, wanted) in enumerate(zip(call.operands, decision.inputs))
        if spec.placements != wanted
    ]
    if moves and is_view(call.op) and getattr(_ASSIGNING, "now", False):
        raise OpPlacementError(
            f"{call.op} of {call.describe(moves[0][0])} is a copy, so an assignment to it would be lost; assign through a "
            "mask of the tensor's own shape (x[mask] = value) or to rows of a ragged tensor (x[2:5] = value), use "
            "torch.where, or call redistribute() first"
        )
    locals_ = [local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    for index, spec, target in moves:  # refuse before the first communication
        tell_move(call.op, call.argument_name(call.positions[index][0]), locals_[index], spec, target)
        if _is_reported(spec, target):
            is_lost = is_view(call.op) and not is_installed("models")  # else writes to the copy reach the operand
            report_fallback(str(call.op), call.describe(index), placements_text(target.placements), is_lost)
        observe_redistribution(spec, target, call.op)
    for index, spec, target in moves:
        before = locals_[index]
        locals_[index] = move_local(before, spec.mesh, spec.shape, spec.placements, target.placements).wait()
        if is_view(call.op):  # of a copy then, to which the program may write
            remember_copy(before, spec, locals_[index], target)
    if decision.redispatch:
        for index, _, target in moves:
            tensors[index] = make_dtensor(locals_[index], target)
        new_args, new_kwargs = substitute(args, kwargs, tensors, torch.Tensor)
        try:
            return call.op(*new_args, **new_kwargs)
        except NotImplementedError:  # PyTorch has no strategy, or the kernel does not take the dtype: that raises again
            if not _all_replicated(decision) or not rank_in_mesh(call.mesh):
                raise
        local_args, local_kwargs = substitute(args, kwargs, locals_, torch.Tensor)
        return _replicated(call.mesh, call.op(*local_args, **local_kwargs))
    specs = cached(output_specs, call, decision)
    if not rank_in_mesh(call.mesh):
        result = _placeholder(specs)
    else:
        for index, function in decision.prepare:
            locals_[index] = function(locals_[index])
        local_args, local_kwargs = substitute(args, kwargs, locals_, torch.Tensor)
        result = (decision.local or call.op)(*local_args, **local_kwargs)
        for index, _, target in moves:
            if index in decision.write_back:
                write_back(tensors[index], locals_[index], target)
    return _results(call, args, kwargs, result, specs)


def write_back(x: DTensor, written: torch.Tensor, target: DTensorSpec) -> None:
    """An op has written to a moved copy of ``x``, of which ``written`` is this rank's part: give ``x`` its values. A pending
    reduction that contributions of ranks cannot be found for (a norm, a product) has them as they are."""
    spec = spec_of(x)
    if any(p.is_partial() and not is_pending(p, "sum", "avg", "max", "min") for p in spec.placements):
        return replace_parts(x, written, target)
    back = move_local(written, spec.mesh, spec.shape, target.placements, spec.placements).wait()
    if back is not local_of(x):
        local_of(x).copy_(back)


def _all_replicated(decision: Decision) -> bool:
    return all(placement.is_replicate() for placements in decision.inputs for placement in placements)


def _replicated(mesh: DeviceMesh, result: Any) -> Any:
    """Results that every rank of the mesh has computed from whole operands, as DTensors."""
    if isinstance(result, torch.Tensor):
        spec = make_spec(mesh, (Replicate(),) * mesh.ndim, result.shape, result.stride(), result.dtype)
        return make_dtensor(result, spec)
    return type(result)([_replicated(mesh, one) for one in result]) if isinstance(result, list | tuple) else result


def _results(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, specs: Any) -> Any:
    if call.mutated:
        if not has_results(call.op):
            return None
        written = [_tensors(args, kwargs)[index] for index in call.mutated]
        return written[0] if len(written) == 1 else tuple(written)
    if specs is None:
        return result
    if isinstance(specs, DTensorSpec):
        wrapped: Any = make_dtensor(result, specs)
    else:
        wrapped = type(result)(
            [one if spec is None else make_dtensor(one, spec) for one, spec in zip(result, specs, strict=True)]
        )
    return with_aliasing(call.op, args, kwargs, wrapped) if is_view(call.op) else wrapped


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [item for item in arg if isinstance(item, torch.Tensor)]
    return found


def _placeholder(specs: Any) -> Any:
    """The results on a rank outside of the mesh: an empty tensor for each, zero for a number."""
    if isinstance(specs, DTensorSpec):
        assert specs.tensor_meta is not None
        return torch.zeros((0,) if specs.shape else (), dtype=specs.tensor_meta.dtype)
    return [_placeholder(spec) for spec in specs] if specs is not None else None


def _is_reported(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a move gives up a custom placement, over an axis of several ranks, and gathers more than a single number."""
    if math.prod(source.shape) <= 1 or has_custom(target.placements):
        return False
    triples = zip(source.placements, target.placements, source.mesh.shape)
    return any(
        isinstance(before, CustomPlacement) and after.is_replicate() and size > 1 for before, after, size in triples
    )
