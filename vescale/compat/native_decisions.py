"""What the C++ dispatcher needs to know of a decision: the operands that change on the local tensors, and the results."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale.compat.closed_forms import Part, Parts, Result, intern, layout_of, local_sizes
from vescale.compat.dtensor import DTensorSpec, StridedShard, rank_in_mesh
from vescale.compat.op_info import OutputSharding, is_view
from vescale.compat.patching import HOOKS

_aten = torch.ops.aten
_PLAIN = frozenset([Replicate, Shard, Partial])
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


def parts_of_arguments(op: Any, schema: Any, sharding: OutputSharding) -> Parts | None:
    """What this rank takes of the operands that PyTorch moves, if each is whole on the axes that change: summands, as of the
    bias of a layer with sharded rows, or equal parts, as of embeddings of positions for a sharded sequence. None where one
    is communicated, or cut unevenly.
    """
    wanted = sharding.redistribute_schema
    if wanted is None or wanted.op != op or wanted.kwargs_schema != schema.kwargs_schema:
        return None
    if len(wanted.args_schema) != len(schema.args_schema):
        return None
    parts: list[Part] = []
    for index, (given, target) in enumerate(zip(schema.args_schema, wanted.args_schema)):
        if given == target:
            continue
        if (
            not isinstance(given, DTensorSpec)
            or not isinstance(target, DTensorSpec)
            or op._schema.arguments[index].alias_info is not None
            or (taken := _parts_of(index, given, target)) is None
        ):
            return None
        parts += taken
    return tuple(parts)


def _parts_of(index: int, given: DTensorSpec, target: DTensorSpec) -> list[Part] | None:
    mesh, meta, coordinate = given.mesh, given.tensor_meta, given.mesh.get_coordinate()
    kinds = (*given.placements, *target.placements)
    if meta is None or coordinate is None or not all(type(p) in _PLAIN or hasattr(p, "num_chunks") for p in kinds):
        return None
    parts: list[Part] = []
    for axis, (before, after) in enumerate(zip(given.placements, target.placements)):
        size = mesh.size(axis)
        if before == after or size == 1:
            continue
        if not before.is_replicate():
            return None
        if type(after) is Partial and after.reduce_op == "sum" and meta.dtype.is_floating_point:
            parts.append((index, -1, size, 0, 1))
            continue
        dim = getattr(after, "dim", None)
        cuts = [a for a, p in enumerate(target.placements) if getattr(p, "dim", None) == dim and mesh.size(a) > 1]
        chunks = [getattr(target.placements[a], "num_chunks", 1) for a in cuts]
        num_parts = math.prod(chunks) * math.prod(map(mesh.size, cuts))
        if dim is None or after in given.placements[axis + 1 :] or (len(cuts) > 1 and max(chunks) > 1):
            return None
        if not meta.shape[dim] or meta.shape[dim] % num_parts:
            return None
        parts.append((index, dim, size, coordinate[axis], max(chunks)))
    return parts


def local_arguments(op: Any, schema: Any, sharding: OutputSharding) -> list[tuple[int, tuple[int, ...]]] | None:
    """Arguments that are local sizes where the call has global ones; None where anything else differs."""
    wanted = sharding.redistribute_schema
    if not sharding.use_val_from_redistribute_schema or wanted is None:
        return None
    if op is _aten.squeeze.dim and wanted.op is _aten.squeeze.dims:
        spec, dim = schema.args_schema
        return [] if _squeezes_alike(spec, dim, wanted.args_schema[1]) else None
    if wanted.op != op or len(wanted.args_schema) != len(schema.args_schema):
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


def _squeezes_alike(spec: DTensorSpec, dim: int, dims: Any) -> bool:
    """Whether ``squeeze(dim)`` of the local tensor removes ``dims``: PyTorch names them, because a part may have one index
    of a dim that has more."""
    layout = layout_of(spec)
    if not layout.is_plain or not spec.shape:
        return False
    return bool(dims) == (local_sizes(layout, spec.shape)[dim] == 1)


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
