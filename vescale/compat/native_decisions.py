"""What the C++ dispatcher needs to know of a decision: the operands that change on the local tensors, and the results."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.compat.closed_forms import Result
from vescale.compat.dtensor import DTensorSpec, StridedShard, rank_in_mesh
from vescale.compat.layouts import intern
from vescale.compat.op_info import OutputSharding, is_view
from vescale.compat.patching import HOOKS

__all__ = ["STOCK_PLACEMENTS", "divided_arguments", "intern_spec", "local_arguments", "results_of"]

STOCK_PLACEMENTS = frozenset([Replicate, Shard, Partial, StridedShard])


def intern_spec(spec: DTensorSpec) -> DTensorSpec | None:
    """The spec that stands for all equal ones, or None where calls with it take PyTorch's path."""
    meta = spec.tensor_meta
    if (
        meta is None
        or not all(type(size) is int for size in (*meta.shape, *meta.stride))
        or not rank_in_mesh(spec.mesh)
    ):
        return None
    placements = HOOKS.get("placements")
    for placement in spec.placements:
        if type(placement) not in STOCK_PLACEMENTS and (
            placements is None or type(placement) not in placements.custom_types
        ):
            return None
    return intern(spec)


def divided_arguments(op: Any, schema: Any, sharding: OutputSharding) -> list[tuple[int, int]] | None:
    """Operands that PyTorch moves, where each is whole on one axis and becomes a pending sum there, of equal summands: what
    a layer with sharded rows does to its bias. None where another one moves."""
    wanted = sharding.redistribute_schema
    if wanted is None or wanted.op != op or wanted.kwargs_schema != schema.kwargs_schema:
        return None
    if len(wanted.args_schema) != len(schema.args_schema):
        return None
    divided = []
    for index, (given, target) in enumerate(zip(schema.args_schema, wanted.args_schema)):
        if given == target:
            continue
        if (
            not isinstance(given, DTensorSpec)
            or not isinstance(target, DTensorSpec)
            or op._schema.arguments[index].alias_info is not None
        ):
            return None
        changes = [axis for axis, p in enumerate(given.placements) if p != target.placements[axis]]
        changes = [axis for axis in changes if given.mesh.size(axis) > 1]
        if len(changes) != 1 or given.tensor_meta is None or not given.tensor_meta.dtype.is_floating_point:
            return None
        (axis,) = changes
        if not (given.placements[axis].is_replicate() and target.placements[axis].is_partial("sum")):
            return None
        divided.append((index, given.mesh.size(axis)))
    return divided


def local_arguments(op: Any, schema: Any, sharding: OutputSharding) -> list[tuple[int, tuple[int, ...]]] | None:
    """Arguments that are local sizes where the call has global ones; None where anything else differs."""
    wanted = sharding.redistribute_schema
    if not sharding.use_val_from_redistribute_schema or wanted is None or wanted.op != op:
        return None
    if len(wanted.args_schema) != len(schema.args_schema):
        return None
    replaced = []
    for index, (given, local) in enumerate(zip(schema.args_schema, wanted.args_schema)):
        if isinstance(given, DTensorSpec):
            if given != local:
                return None
        elif given != local:
            if not isinstance(local, list | tuple) or not all(type(size) is int for size in local):
                return None
            replaced.append((index, tuple(local)))
    return replaced


def results_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: OutputSharding
) -> tuple[Result, ...] | None:
    """Of each result the specs of its tensors, and the positions of the arguments that are returned in its place, or whose
    storage it shares; None where C++ cannot make them."""
    declared = op._schema.returns
    if not declared:
        return ()
    if sharding.output_spec is None:
        return None
    specs = sharding.output_spec
    per_result = specs if isinstance(specs, tuple | list) and len(declared) > 1 else (specs,)
    if len(per_result) != len(declared):
        return None
    results = []
    for returned, spec in zip(declared, per_result):
        listed = tuple(spec) if isinstance(spec, tuple | list) else (spec,)
        kept = tuple(None if one is None else intern_spec(one) for one in listed)
        if any(a is not None and b is None for a, b in zip(listed, kept)):
            return None
        written = viewed = -1
        alias = returned.alias_info
        if alias is not None and alias.is_write:
            written = _position_of(op, alias)
            argument = args[written] if written < len(args) else kwargs.get(op._schema.arguments[written].name)
            if not isinstance(argument, DTensor) or not _keeps(argument._spec, kept[0]):
                return None
        elif (
            alias is not None and alias.before_set and is_view(op)
        ):  # not lists of views: PyTorch's share nothing either
            viewed = _position_of(op, alias)
        results.append((kept, written, viewed))
    return tuple(results)


def _position_of(op: Any, alias: Any) -> int:
    """Where the argument is that a result is or shares memory with, by their alias sets."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & alias.before_set:
            return index
    raise AssertionError(f"{op._schema} has a result that aliases no argument")


def _keeps(before: DTensorSpec, after: DTensorSpec | None) -> bool:
    if after is None or before.tensor_meta is None or after.tensor_meta is None:
        return False
    return before.placements == after.placements and before.tensor_meta.shape == after.tensor_meta.shape
