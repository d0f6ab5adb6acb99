"""Embedding lookup in a table whose rows are sharded (a vocabulary-parallel embedding)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, no_torch_function
from vescale.ops import bring, bring_with_gradient, enter_local, leave_local
from vescale.placements import at_dim, local_region, shard_dim

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["embedding"]

_OP = "embedding"
_FUNCTIONAL = inspect.signature(F.embedding)


def embedding(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each rank looks up the rows that it holds; rows elsewhere count as zero, and the result is Partial.

    A plain ``Partial(sum)``, which every op understands, where stock DTensor gives a masked one that only a
    redistribution does. A table that is not sharded over rows is looked up by DTensor's own rule.

    Raises:
        NotImplementedError: ``max_norm`` or ``scale_grad_by_freq`` on a table with sharded rows.
    """
    if func is F.embedding:
        call = _FUNCTIONAL.bind(*args, **kwargs)
        call.apply_defaults()
        indices, weight, padding = (call.arguments[name] for name in ("input", "weight", "padding_idx"))
        special = call.arguments["max_norm"] is not None or call.arguments["scale_grad_by_freq"]
    else:
        weight, indices = args[0], args[1]
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        special = (args[3] if len(args) > 3 else kwargs.get("scale_grad_by_freq", False)) is True
        padding = None if padding == -1 else padding
    rows = [isinstance(weight, DTensor) and shard_dim(p) == 0 for p in getattr(weight, "placements", ())]
    if not any(rows):
        return func(*args, **kwargs)
    if special:
        raise NotImplementedError(
            f"{_OP}: max_norm and scale_grad_by_freq with a table of placements {tuple(weight.placements)} need the rows "
            "of other ranks; leave them out, or replicate the table"
        )
    padding = padding + weight.shape[0] if padding is not None and padding < 0 else padding
    return _lookup(runtime, weight, indices, padding)


def _lookup(runtime: Runtime, weight: DTensor, indices: DTensor, padding: int | None) -> DTensor:
    mesh = runtime.mesh
    index_target: list[Placement] = []
    weight_target: list[Placement] = []
    grads: list[Placement] = []
    out: list[Placement] = []
    for own, of_index in zip(weight.placements, indices.placements):
        dim = shard_dim(own)
        if dim is not None:  # a sharded table meets whole indices
            index_target.append(Replicate())
            weight_target.append(own)
            grads.append(own)
            out.append(Partial() if dim == 0 else at_dim(own, indices.ndim + dim - 1))
        else:
            kept = Replicate() if of_index.is_partial() else of_index
            index_target.append(kept)
            weight_target.append(Replicate())
            grads.append(Replicate() if kept.is_replicate() else Partial())
            out.append(kept)
    with no_torch_function():
        local_indices = local_of(bring(indices, index_target, _OP, "indices"))
        weight = bring_with_gradient(weight, weight_target, _OP, "weight")
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        ranges = local_region(tuple(weight.shape), tuple(weight_target), tuple(mesh.shape), coordinate).intervals[0]
        table = enter_local(weight, grads)
        local = _local_lookup(table, local_indices, ranges, padding)
        return leave_local(local, mesh, out, (*indices.shape, weight.shape[1]), _OP)


def _local_lookup(
    table: torch.Tensor, indices: torch.Tensor, ranges: tuple[tuple[int, int], ...], padding: int | None
) -> torch.Tensor:
    """Rows of the table that holds the global rows of ``ranges``; zero for all others, without a gradient."""
    rows = torch.full_like(indices, -1)
    local_padding, position = None, 0
    for start, stop in ranges:
        inside = (indices >= start) & (indices < stop)
        rows = torch.where(inside, indices - start + position, rows)
        if padding is not None and start <= padding < stop:
            local_padding = padding - start + position
        position += stop - start
    missing = rows < 0
    if table.shape[0] == 0:  # more ranks than rows
        return table.new_zeros(*indices.shape, table.shape[1]) + table.sum()
    found = F.embedding(rows.masked_fill(missing, 0), table, local_padding)
    return found.masked_fill(missing.unsqueeze(-1), 0)
