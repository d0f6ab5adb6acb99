"""The entry points from DTensor's dispatcher: ops and assignments on DTensors with a placement that stock DTensor lacks.

The dispatcher calls :func:`run_op` on a miss of its C++ cache. When the rules find that the op runs on the local tensors as
they are, it returns a sharding decision that the dispatcher caches: the next call costs what it costs on ``Shard``.
Otherwise the op is run here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, OutputSharding, StridedShard, decompose
from vescale.ops._call import OpCall
from vescale.ops._decide import cached, cached_sharding, decide
from vescale.ops._decision import Decision
from vescale.ops._execute import assigning, execute
from vescale.ops._regrouped_dims import is_cut_unevenly
from vescale.ops.interleaved import interleaved_rule, treats_indices_alike
from vescale.ops.views import VIEWS, holds_the_same, view_rule
from vescale.placements import shard_dim, split_factor

__all__ = ["keeps_operands", "misjudged_view", "run_interleaved", "run_op", "set_item", "view_of_uneven_shards"]


def run_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The op's result, or a sharding decision (``OutputSharding``) for the dispatcher to cache and follow.

    Raises:
        RuntimeError: an in-place op that would have to move the tensor it writes to, operands on different meshes, a
            random op that :mod:`vescale.rng` does not run.
        PlacementFallbackError: no rule, in strict mode.
    """
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision = cached(decide, call)
    if decision.fallback and not call.mutated:
        result = decompose(op, args, kwargs)
        if result is not NotImplemented:
            return result
    return cached_sharding(call, decision) or execute(call, decision, args, kwargs)


def keeps_operands(op: Any, schema: Any) -> OutputSharding | None:
    """The decision to run an op on the local tensors as they are, or None. Runs nothing; the caller's key holds the op, the
    specs of the operands and all other arguments.

    Raises what :func:`run_op` raises when it decides.
    """
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision = cached(decide, call)
    return None if decision.fallback else cached_sharding(call, decision)


def run_interleaved(args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The result of an op on stock placements with a ``_StridedShard``, or empty shards, among them, or a sharding decision.

    No communication; None where the op would need some. PyTorch makes a ``_StridedShard`` of a sharded dim that is flattened
    behind another one (tokens of a sharded sequence), and has few strategies that keep it. For ops that treat indices alike
    it is the same as an interleaved placement.
    """
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision | None = cached(_decide_interleaved, call)
    if decision is None:
        return None
    flattened = {
        axis for spec in call.operands for axis, p in enumerate(spec.placements) if isinstance(p, StridedShard)
    }

    def stock(placements: Sequence[Placement] | None) -> tuple[Placement, ...] | None:
        """The placements with stock types. A shard of one piece becomes a ``_StridedShard`` too, so that equal shards are
        equal placements, except in a view: that may have undone the flattening."""
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
        moves = [
            (a, b)
            for axis, (a, b) in enumerate(zip(spec.placements, wanted))
            if a != b and not _is_same_cut(a, b) and call.mesh.size(axis) > 1
        ]
        # Whole operands may be cut, which is local.
        if moves and (index in call.mutated or not all(a.is_replicate() and not b.is_partial() for a, b in moves)):
            return None
        inputs.append((stock(wanted) if moves else None) or spec.placements)
    outputs = decision.outputs and tuple(map(stock, decision.outputs))
    decision = replace(decision, inputs=tuple(inputs), outputs=outputs)
    return cached_sharding(call, decision) or execute(call, decision, args, kwargs)


@functools.lru_cache(maxsize=1024)
def _decide_interleaved(call: OpCall) -> Decision | None:
    decision = interleaved_rule(call) if treats_indices_alike(call.op) else None
    return decision or (view_rule(call) if _is_cut_twice(call.operands[0]) else None)


def _is_cut_twice(spec: DTensorSpec) -> bool:
    """Whether several axes shard one dim. PyTorch's views do not split such dims; it places the views of all others best."""
    dims = [
        dim for axis, p in enumerate(spec.placements) if (dim := shard_dim(p)) is not None and spec.mesh.size(axis) > 1
    ]
    return len(dims) > len(set(dims))


def _is_same_cut(a: Placement, b: Placement) -> bool:
    return shard_dim(a) is not None and (shard_dim(a), split_factor(a)) == (shard_dim(b), split_factor(b))


def view_of_uneven_shards(args: tuple[Any, ...] | None, kwargs: dict[str, Any], schema: Any) -> Any:
    """The result of a view of stock placements that flattens or splits a dim which the ranks do not divide, or a sharding
    decision. No communication.

    None where no placement describes what each rank holds; also where there is no decision and ``args`` is None.
    """
    if schema.op.overloadpacket.__name__ not in VIEWS:
        return None
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision | None = cached(_decide_uneven, call)
    if decision is None:
        return None
    found = cached_sharding(call, decision)
    return found if found is not None or args is None else execute(call, decision, args, kwargs)


@functools.lru_cache(maxsize=1024)
def _decide_uneven(call: OpCall) -> Decision | None:
    return view_rule(call) if is_cut_unevenly(call.operands[0]) else None


def misjudged_view(args: tuple[Any, ...] | None, kwargs: dict[str, Any], schema: Any, sharding: Any) -> Any:
    """Where PyTorch's decision for a view gives ranks other elements than the view's placements say: what to do instead, as
    :func:`view_of_uneven_shards`; NotImplemented where no placement describes what each rank holds, or nothing can be
    decided. None where the decision is right.

    PyTorch compares the size of a dim with the ranks of one axis after the other, also where several axes cut it.
    """
    spec = schema.args_schema[0] if schema.args_schema else None
    if schema.op.overloadpacket.__name__ not in VIEWS or not isinstance(spec, DTensorSpec):
        return None
    dims = [p.dim for p in spec.placements if type(p) is Shard]
    if len(dims) == len(set(dims)) or not isinstance(output := sharding.output_spec, DTensorSpec):
        return None
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    if cached(_is_right, call, output.placements):
        return None
    decision: Decision | None = cached(_decide_view, call)
    found = None if decision is None else cached_sharding(call, decision)
    if found is None and decision is not None and args is not None:
        found = execute(call, decision, args, kwargs)
    return NotImplemented if found is None else found


_decide_view = functools.lru_cache(maxsize=1024)(view_rule)


@functools.lru_cache(maxsize=1024)
def _is_right(call: OpCall, placements: tuple[Placement, ...]) -> bool:
    spec, shape = call.operands[0], tuple(call.meta.shape)
    numel = math.prod(shape)
    return not numel or numel != math.prod(spec.shape) or holds_the_same(spec, shape, placements, if_too_large=True)


def set_item(original: Callable[..., None], dtensor: DTensor, index: Any, value: Any) -> None:
    """``dtensor[index] = value`` by PyTorch's ``original``: a view of the tensor, then a write to the view.

    Raises RuntimeError when the view would be a copy.
    """
    with assigning():
        original(dtensor, index, value)
