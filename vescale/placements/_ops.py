"""Runs an op on DTensors of which at least one has a vescale placement.

The dispatcher comes here on a miss of its C++ cache. When the rules find that the op runs on the local tensors as they
are, it gets a sharding decision that it caches: the next call costs what it costs on ``Shard``. Otherwise the op is run
here: operands are moved, a local function runs, results are wrapped. Rules are in ``vescale/placements/_rules``.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    OutputSharding,
    StridedShard,
    TensorMeta,
    clear_sharding_cache,
    decompose,
    has_results,
    is_view,
    local_of,
    make_dtensor,
    make_spec,
    observe_redistribution,
    rank_in_mesh,
    static_keywords,
    takes_only_tensors,
    tell_move,
    with_aliasing,
)
from vescale.placements._custom import CustomPlacement
from vescale.placements._kinds import has_custom, is_sharded, ragged_axis, shard_dim, split_factor
from vescale.placements._move import move_local
from vescale.placements._rules import Decision, OpCall, Rule, find_decision, substitute, treats_indices_alike
from vescale.placements._rules import register_rule as add_rule
from vescale.placements._rules._call import spec_for, with_placements
from vescale.placements._rules.stand_ins import stand_in_rule
from vescale.placements._rules.views import view_rule
from vescale.placements._strict import report_fallback

__all__ = ["register_rule", "run_interleaved", "run_op", "set_item"]

# Threads that run an assignment to items of a DTensor.
_ASSIGNING = threading.local()

# Keyword arguments that decide what results look like; others (alpha, value, ...) only do for integers.
_FORMATS = frozenset(["dtype", "layout", "device", "pin_memory", "memory_format"])


def register_rule(*ops: Any) -> Any:
    """Decorator: a rule for these ops (overloads), asked before the built-in ones.

    The rule gets an :class:`OpCall` and returns a :class:`Decision`, or None to leave the call to the next rule. It must be
    a pure function of the call: decisions are cached, and every rank must come to the same one.
    """

    def decorate(rule: Rule) -> Rule:
        add_rule(ops, rule)
        _decide.cache_clear()
        _output_specs.cache_clear()
        clear_sharding_cache()
        return rule

    return decorate


def run_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The op's result, or a sharding decision (``OutputSharding``) for the dispatcher to cache and follow.

    Raises:
        RuntimeError: an in-place op that would have to move the tensor it writes to, operands on different meshes, a
            random op.
        PlacementFallbackError: no rule, in strict mode.
    """
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision = _remembered(_decide, call)
    if decision.fallback and not call.mutated:
        result = decompose(op, args, kwargs)
        if result is not NotImplemented:
            return result
    if _runs_as_it_is(call, decision):
        return OutputSharding(_remembered(_output_specs, call, decision))
    return _execute(call, decision, args, kwargs)


def run_interleaved(args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The result of an op on stock placements with a ``_StridedShard`` among them, or a sharding decision, without any
    communication; None where there is no such way.

    PyTorch makes a ``_StridedShard`` of a sharded dim that is flattened behind another one (tokens of a sharded sequence),
    and has few strategies that keep it; that it is interleaved is all that matters to ops that treat indices alike.
    """
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision | None = _remembered(_decide_interleaved, call)
    if decision is None:
        return None
    flattened = {
        axis for spec in call.operands for axis, p in enumerate(spec.placements) if isinstance(p, StridedShard)
    }

    def stock(placements: Sequence[Placement] | None) -> tuple[Placement, ...] | None:
        """In stock words; a shard of one piece too, so that tensors that lie alike are labelled alike. What a view takes
        apart again is the Shard that it was."""
        return (
            None
            if placements is None
            else tuple(
                StridedShard(dim, split_factor=split_factor(p))
                if axis in flattened and (dim := shard_dim(p)) is not None and (split_factor(p) > 1 or not regroups)
                else p
                for axis, p in enumerate(placements)
            )
        )

    regroups = decision.local is not None
    inputs = []
    for index, (spec, wanted) in enumerate(zip(call.operands, decision.inputs)):
        moves = [(a, b) for a, b in zip(spec.placements, wanted) if a != b and not _is_same_cut(a, b)]
        # Whole operands may be cut, which is local.
        if moves and (index in call.mutated or not all(a.is_replicate() and is_sharded(b) for a, b in moves)):
            return None
        inputs.append((stock(wanted) if moves else None) or spec.placements)
    outputs = decision.outputs and tuple(map(stock, decision.outputs))
    decision = replace(decision, inputs=tuple(inputs), outputs=outputs)
    if _runs_as_it_is(call, decision):
        return OutputSharding(_remembered(_output_specs, call, decision))
    return _execute(call, decision, args, kwargs)


@functools.lru_cache(maxsize=1024)
def _decide_interleaved(call: OpCall) -> Decision | None:
    return stand_in_rule(call) or (view_rule(call) if _is_cut_twice(call.operands[0]) else None)


def _is_cut_twice(spec: DTensorSpec) -> bool:
    """Whether several axes cut one dim, which is what PyTorch's views do not take apart; the others it labels best."""
    dims = [
        dim for axis, p in enumerate(spec.placements) if (dim := shard_dim(p)) is not None and spec.mesh.size(axis) > 1
    ]
    return len(dims) > len(set(dims))


def _is_same_cut(a: Placement, b: Placement) -> bool:
    return shard_dim(a) is not None and (shard_dim(a), split_factor(a)) == (shard_dim(b), split_factor(b))


def set_item(original: Callable[..., None], dtensor: DTensor, index: Any, value: Any) -> None:
    """``dtensor[index] = value`` by PyTorch's ``original``: a view of the tensor, then a write to the view.

    Raises RuntimeError when the view would be a copy.
    """
    before = getattr(_ASSIGNING, "now", False)
    _ASSIGNING.now = True
    try:
        original(dtensor, index, value)
    finally:
        _ASSIGNING.now = before


def _remembered(function: Any, *args: Any) -> Any:
    """What a function with an ``lru_cache`` gives; computed anew where an argument of the call has no hash."""
    try:
        return function(*args)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return function.__wrapped__(*args)


@functools.lru_cache(maxsize=8192)
def _decide(call: OpCall) -> Decision:
    decision = find_decision(call) or _give_up_placements(call)
    _check_in_place(call, decision)
    return decision


def _give_up_placements(call: OpCall) -> Decision:
    """No rule: our placements become Replicate, and PyTorch's own strategy goes on from there.

    The stock placements of the other mesh axes stay only for ops whose strategies are known to be right on them. For the
    rest everything is gathered, so that the op runs as on one device. Stock operands that such an op writes to are moved
    back afterwards; ours are refused (``_check_in_place``).
    """
    if treats_indices_alike(call):
        inputs = tuple(
            tuple(Replicate() if isinstance(placement, CustomPlacement) else placement for placement in spec.placements)
            for spec in call.operands
        )
        return Decision(inputs, redispatch=True, fallback=True)
    inputs = tuple((Replicate(),) * spec.mesh.ndim for spec in call.operands)
    written = tuple(index for index in call.mutated if not has_custom(call.operands[index].placements))
    return Decision(inputs, redispatch=not written, write_back=written, fallback=True)


def _check_in_place(call: OpCall, decision: Decision) -> None:
    for index in call.mutated:
        spec, wanted = call.operands[index], decision.inputs[index]
        if spec.placements == wanted or index in decision.scratch or index in decision.write_back:
            continue
        raise RuntimeError(
            f"{call.op} writes to {_describe(call, index)}, and needs it as {_text(wanted)}: the write would land in a "
            "copy and be lost; use the out-of-place op and redistribute its result, or call redistribute() first"
        )


def _runs_as_it_is(call: OpCall, decision: Decision) -> bool:
    """Whether the dispatcher can run the op on the local tensors and cache that, under the key that it uses."""
    if decision.local is not None or decision.prepare or decision.redispatch:
        return False
    if any(spec.placements != wanted for spec, wanted in zip(call.operands, decision.inputs)):
        return False
    if call.mutated:
        return True  # results are the written operands: nothing depends on other arguments
    if call.schema_info is None:  # the key has the tensors alone
        return decision.outputs is None or takes_only_tensors(call.op)
    if call.schema_info.needs_pytree:  # the key leaves numbers out: right as long as they cannot change a dtype
        return all(spec.tensor_meta is not None and spec.tensor_meta.dtype.is_floating_point for spec in call.operands)
    known = static_keywords(call.schema_info)
    others = [name for name in call.kwargs if name not in known]
    if any(name in _FORMATS for name in others):
        return False
    return not others or all(spec.tensor_meta.dtype.is_floating_point for spec in call.operands if spec.tensor_meta)


@functools.lru_cache(maxsize=8192)
def _output_specs(call: OpCall, decision: Decision) -> Any:
    """Specs in the structure of the op's results; None for results that are not tensors. Equal calls get the same objects,
    so that later ops find them by identity."""
    if decision.outputs is None:
        return None
    meta = call.meta
    metas = [meta] if isinstance(meta, TensorMeta) else list(meta)
    specs = [
        None
        if one is None or placements is None
        else spec_for(call.mesh_of_result(index), placements, one, contiguous=ragged_axis(placements) is not None)
        for index, (one, placements) in enumerate(zip(metas, decision.outputs, strict=True))
    ]
    return specs[0] if isinstance(meta, TensorMeta) else tuple(specs)


def _execute(call: OpCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = _tensors(args, kwargs)
    moves = [
        (index, spec, with_placements(spec, wanted))
        for index, (spec, wanted) in enumerate(zip(call.operands, decision.inputs))
        if spec.placements != wanted
    ]
    if moves and is_view(call.op) and getattr(_ASSIGNING, "now", False):
        raise RuntimeError(
            f"{call.op} of {_describe(call, moves[0][0])} is a copy, so an assignment to it would be lost; assign through a "
            "mask of the tensor's own shape (x[mask] = value) or to rows of a ragged tensor (x[2:5] = value), use "
            "torch.where, or call redistribute() first"
        )
    locals_ = [local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    for index, spec, target in moves:  # refuse before the first communication
        tell_move(call.op, call.argument_name(call.positions[index][0]), locals_[index], spec, target)
        if _is_reported(spec, target):
            report_fallback(str(call.op), _describe(call, index), _text(target.placements), is_view(call.op))
        observe_redistribution(spec, target, call.op)
    for index, spec, target in moves:
        locals_[index] = move_local(locals_[index], spec.mesh, spec.shape, spec.placements, target.placements).wait()
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
    specs = _remembered(_output_specs, call, decision)
    if not rank_in_mesh(call.mesh):
        result = _placeholder(specs)
    else:
        for index, function in decision.prepare:
            locals_[index] = function(locals_[index])
        local_args, local_kwargs = substitute(args, kwargs, locals_, torch.Tensor)
        result = (decision.local or call.op)(*local_args, **local_kwargs)
        for index, spec, target in moves:
            if index in decision.write_back:
                back = move_local(locals_[index], spec.mesh, spec.shape, target.placements, spec.placements).wait()
                local_of(tensors[index]).copy_(back)
    return _results(call, args, kwargs, result, specs)


def _all_replicated(decision: Decision) -> bool:
    return all(placement.is_replicate() for placements in decision.inputs for placement in placements)


def _replicated(mesh: DeviceMesh, result: Any) -> Any:
    """What every rank of the mesh has computed from whole operands, as DTensors."""
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
    """What a rank outside the mesh holds: an empty tensor for each result, zero for a number."""
    if isinstance(specs, DTensorSpec):
        assert specs.tensor_meta is not None
        return torch.zeros((0,) if specs.shape else (), dtype=specs.tensor_meta.dtype)
    return [_placeholder(spec) for spec in specs] if specs is not None else None


def _is_reported(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a move gives up our placements and gathers; a single number does not count."""
    if math.prod(source.shape) <= 1 or has_custom(target.placements):
        return False
    pairs = zip(source.placements, target.placements)
    return any(isinstance(before, CustomPlacement) and after.is_replicate() for before, after in pairs)


def _describe(call: OpCall, index: int) -> str:
    argument, position = call.positions[index]
    name = call.argument_name(argument)
    spec = call.operands[index]
    where = name if position is None else f"{name}[{position}]"
    return f"operand {where} of shape {tuple(spec.shape)} placed as {_text(spec.placements)}"


def _text(placements: Sequence[Placement]) -> str:
    return "(" + ", ".join(map(repr, placements)) + ")"
