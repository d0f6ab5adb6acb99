"""The decision about an op call: that of the first rule that returns one, else to give up custom placements; cached."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.compat import (
    DTensorSpec,
    OutputSharding,
    TensorMeta,
    clear_sharding_caches,
    sized_locally,
    spec_of_result,
    static_keywords,
    takes_only_tensors,
)
from vescale.errors import OpPlacementError, RuleError
from vescale.ops._call import Decision, OpCall, Placements, Rule, placements_text
from vescale.ops._registry import check_decision, register_user_rule, rules_of
from vescale.ops.interleaved import treats_indices_alike
from vescale.placements import CustomPlacement, contiguous_stride, ragged_axis

# Keyword arguments that decide the format of results; others (alpha, value, ...) only do for integers.
_FORMATS = frozenset(["dtype", "layout", "device", "pin_memory", "memory_format"])


def cached(function: Any, *args: Any) -> Any:
    """The result of a function with an ``lru_cache``; computed anew where an argument has no hash."""
    try:
        return function(*args)
    except TypeError:
        if _has_hash(args):
            raise
        return function.__wrapped__(*args)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=8192)
def decide(call: OpCall) -> Decision:
    """How the call runs. Raises RuntimeError for an in-place op that would have to move the tensor it writes to, and what
    rules raise."""
    return _written_back(call, _first_decision(call) or _give_up_placements(call))


def _first_decision(call: OpCall) -> Decision | None:
    for rule in rules_of(call.op):
        decision: Decision | None = rule(call)
        if decision is not None:
            return decision
    return None


def forget_decisions() -> None:
    """Decide every call anew, with rules that were added since."""
    decide.cache_clear()
    output_specs.cache_clear()
    clear_sharding_caches()


def _give_up_placements(call: OpCall) -> Decision:
    """The decision without a rule: custom placements become Replicate, and PyTorch's own strategy decides the rest.

    The stock placements of the other mesh axes stay only for ops whose strategies are known to be right on them. For the
    rest everything is gathered, so that the op runs as on one device.
    """
    if treats_indices_alike(call.op) and not call.mutated:
        inputs = tuple(
            tuple(Replicate() if isinstance(placement, CustomPlacement) else placement for placement in spec.placements)
            for spec in call.operands
        )
        return Decision(inputs, redispatch=True, fallback=True)
    inputs = tuple((Replicate(),) * spec.mesh.ndim for spec in call.operands)
    return Decision(inputs, redispatch=not call.mutated, fallback=True)


def _written_back(call: OpCall, decision: Decision) -> Decision:
    """The decision, by which what the op writes to is moved back. Raises OpPlacementError where PyTorch decides the rest."""
    moved = tuple(
        index
        for index in call.mutated
        if call.operands[index].placements != decision.inputs[index] and index not in decision.scratch
    )
    if not moved or not decision.redispatch:
        return dataclasses.replace(decision, write_back=moved) if moved else decision
    index = moved[0]
    raise OpPlacementError(
        f"{call.op} writes to {call.describe(index)}, which it needs as {placements_text(decision.inputs[index])}: it "
        "would write to a copy, and the write would be lost; use the out-of-place op and redistribute its result, or "
        "call redistribute() first"
    )


def cached_sharding(call: OpCall, decision: Decision) -> OutputSharding | None:
    """The decision for DTensor's dispatcher to cache and follow, or None where it cannot: the op itself runs on the local
    tensors as they are, with the given arguments or with local sizes."""
    stays = all(spec.placements == wanted for spec, wanted in zip(call.operands, decision.inputs))
    if stays and runs_by_key(call, decision):
        return OutputSharding(cached(output_specs, call, decision))
    if decision.local_sizes is None or len(call.args) != 2 or call.kwargs or call.schema_info is None:
        return None
    (spec,) = call.operands
    if call.schema_info.static_argnum > 1 or spec.placements != decision.inputs[0]:
        return None  # sizes are not in the dispatcher's key
    return sized_locally(call.op, spec, decision.local_sizes, cached(output_specs, call, decision))


def runs_by_key(call: OpCall, decision: Decision) -> bool:
    """Whether the dispatcher can run the op itself on local tensors, and remember that under the key that it uses."""
    if decision.local is not None or decision.prepare or decision.redispatch:
        return False
    if call.mutated:
        return True  # results are the written operands: nothing depends on other arguments
    # The key leaves numbers out: right as long as they cannot change a dtype.
    are_floating = all(spec.tensor_meta and spec.tensor_meta.dtype.is_floating_point for spec in call.operands)
    if call.schema_info is None:  # it has the tensors alone
        return decision.outputs is None or takes_only_tensors(call.op, factors=are_floating)
    if call.schema_info.needs_pytree:
        return are_floating
    known = static_keywords(call.schema_info)
    others = [name for name in call.kwargs if name not in known]
    return not any(name in _FORMATS for name in others) and (not others or are_floating)


@functools.lru_cache(maxsize=8192)
def output_specs(call: OpCall, decision: Decision) -> Any:
    """Specs in the structure of the op's results; None for results that are not tensors. Equal calls get the same objects,
    which the dispatcher compares faster than equal ones."""
    if decision.outputs is None:
        return None
    meta = call.meta
    metas = [meta] if isinstance(meta, TensorMeta) else list(meta)
    specs = [
        None if one is None or placements is None else _output_spec(call, call.mesh_of_result(index), placements, one)
        for index, (one, placements) in enumerate(zip(metas, decision.outputs, strict=True))
    ]
    return specs[0] if isinstance(meta, TensorMeta) else tuple(specs)


def _output_spec(call: OpCall, mesh: DeviceMesh, placements: Placements, meta: TensorMeta) -> DTensorSpec:
    if ragged_axis(placements) is not None:  # a flat local tensor has the elements in row-major order, whatever the op
        meta = TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype)
    return spec_of_result(mesh, placements, meta, call.operands)


_Overload, _AllOverloads = type(torch.ops.aten.alias.default), type(torch.ops.aten.alias)


def register_rule(op: Any, rule: Rule) -> None:
    """Add a placement rule: how an op runs on DTensors of which at least one has a vescale placement.

    The rule is called before all others for the op, the latest first. It gets an :class:`OpCall` and returns a
    :class:`Decision`, or None to leave the call to the next rule. It must be a pure function of the call: decisions are
    cached, and every rank must come to the same one. Register rules before the op is first called: decisions that other
    threads have cached (autograd's, for backward) stay.

    DTensors with stock placements only are not affected; for an op that they lack a strategy for, use PyTorch's
    ``torch.distributed.tensor.experimental.register_sharding``.

    Args:
        op: an op overload (``torch.ops.aten.flip.default``), or an iterable of them.
        rule: ``OpCall -> Decision | None``.

    Raises:
        TypeError: something other than op overloads, or a rule that is not callable. When the rule has run, the op
            raises TypeError for anything but a Decision or None, and ValueError for placements that do not fit the
            operands and results of the op.
    """
    if isinstance(op, _Overload | _AllOverloads) or not isinstance(op, Iterable):
        ops = [op]
    else:
        ops = list(op)
    for one in ops:
        if isinstance(one, _AllOverloads):
            raise RuleError(
                f"register_rule: found {one}, which has the overloads {', '.join(one.overloads())}; expected one "
                f"overload or an iterable of them: pass {one}.{one.overloads()[0]}"
            )
        if not isinstance(one, _Overload):
            raise RuleError(
                f"register_rule: found {one!r}; expected an op overload such as torch.ops.aten.flip.default, or an iterable "
                "of them: DTensor sees overloads, not the torch functions that call them"
            )
    if not callable(rule):
        raise RuleError(f"register_rule: found the rule {rule!r}; expected a function of an OpCall")
    for one in ops:
        register_user_rule(one, functools.partial(_checked, rule))
    forget_decisions()


def _checked(rule: Rule, call: OpCall) -> Decision | None:
    decision = rule(call)
    check_decision(rule, call, decision)
    return decision
