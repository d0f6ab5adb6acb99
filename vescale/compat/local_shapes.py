"""Whether an op on the local tensors has results of the shapes that a sharding decision says.

A strategy of PyTorch's says where dims go and does not run the op. Where an op treats an operand by its sizes (``solve``
takes a matrix for a batch of vectors, others broadcast a dim of size 1), the local tensors may mean something else than the
global ones. So each decision is tried once on tensors without memory, of the sizes of the first and of the last rank:
every rank comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from vescale.compat.dtensor import DTensorSpec
from vescale.compat.op_info import OutputSharding, is_view
from vescale.compat.result_metas import result_rule

__all__ = ["has_local_shapes"]

_KNOWN = frozenset((Partial, Replicate, Shard))


def has_local_shapes(op: Any, schema: Any, sharding: Any) -> bool:
    """Whether each rank gets the part of the results that the decision says, as far as shapes tell. Also True
    where the op cannot be tried: without a meta kernel, for views, and for other placements than PyTorch's."""
    if not isinstance(sharding, OutputSharding) or sharding.output_spec is None:
        return True
    if sharding.use_val_from_redistribute_schema or op._schema.is_mutable or is_view(op):
        return True
    if torch.Tag.pointwise in op.tags or result_rule(op, schema.kwargs_schema) is not None:
        return True
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else schema
    if wanted is None or wanted.op != op:
        return True
    results = [x for x in tree_leaves(sharding.output_spec) if isinstance(x, DTensorSpec)]
    specs = [x for x in tree_leaves((wanted.args_schema, wanted.kwargs_schema)) if isinstance(x, DTensorSpec)]
    if any(type(p) not in _KNOWN for spec in (*specs, *results) for p in spec.placements):
        return True
    if not any(p.is_shard() for spec in specs for p in spec.placements):
        return True
    for shape_of in (_first_shape, _last_shape):
        if not any(spec.tensor_meta is None or 0 in shape_of(spec) for spec in (*specs, *results)):
            shapes = _shapes(op, wanted, shape_of)
            if shapes is None:  # because of these sizes?
                return _shapes(op, wanted, lambda spec: spec.shape) is None
            if len(shapes) == len(results) and shapes != [shape_of(spec) for spec in results]:
                return False
    return True


def _shapes(op: Any, schema: Any, shape_of: Callable[[DTensorSpec], Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Of the op's results; None where it raises."""

    def made(spec: DTensorSpec) -> torch.Tensor:
        assert spec.tensor_meta is not None
        return torch.empty(shape_of(spec), dtype=spec.tensor_meta.dtype, device="meta")

    args, kwargs = tree_map_only(DTensorSpec, made, (schema.args_schema, schema.kwargs_schema))
    try:
        found = op(*args, **kwargs)
    except Exception:  # not lost: it is raised where it is raised on one device, too
        return None
    return [tuple(x.shape) for x in tree_leaves(found) if isinstance(x, torch.Tensor)]


def _first_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return _local_shape(spec, False)


def _last_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return _local_shape(spec, True)


def _local_shape(spec: DTensorSpec, is_last: bool) -> tuple[int, ...]:
    """Of the first rank of every axis, or of the last one."""
    shape = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            size, count = shape[placement.dim], spec.mesh.size(axis)
            part = -(-size // count)
            shape[placement.dim] = max(0, size - part * (count - 1)) if is_last else min(part, size)
    return tuple(shape)
