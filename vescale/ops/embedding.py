"""Embedding lookup in a table with sharded rows (vocabulary parallelism), and bags of embeddings over a sharded batch."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, no_torch_function
from vescale.errors import UnsupportedOpError
from vescale.ops._conversion import (
    bring,
    bring_with_gradient,
    enter_local,
    leave_local,
    local_parameter,
    local_rows,
    rows_from_local,
    sharded_rows,
)
from vescale.ops._registry import OpContext, replaces
from vescale.ops.indexing import require_in_bounds
from vescale.placements import at_dim, local_region, shard_dim

_OP = "embedding"
_SIGNATURE = inspect.signature(F.embedding)
_BAG_SIGNATURE = inspect.signature(F.embedding_bag)


class _Call(NamedTuple):
    indices: Any
    weight: Any
    padding: int | None
    counts: bool  # scale_grad_by_freq
    renorms: bool  # max_norm
    is_sparse: bool

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if func is F.embedding:
            call = _SIGNATURE.bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            padding, renorms = given["padding_idx"], given["max_norm"] is not None
            counts = bool(given["scale_grad_by_freq"])
            return cls(given["input"], given["weight"], padding, counts, renorms, bool(given["sparse"]))
        weight, indices = args[0], args[1]
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        counts = args[3] if len(args) > 3 else kwargs.get("scale_grad_by_freq", False)
        sparse = args[4] if len(args) > 4 else kwargs.get("sparse", False)
        return cls(indices, weight, None if padding == -1 else padding, bool(counts), False, bool(sparse))


def _needs_other_ranks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether rows are sharded, or counted: the gradient may arrive sharded where the batch is not; or a sparse gradient is
    asked for: those of DTensors are dense."""
    call = _Call.of(func, args, kwargs)
    return (
        call.counts
        or call.is_sparse
        or any(shard_dim(placement) == 0 for placement in getattr(call.weight, "placements", ()))
    )


@replaces(F.embedding, torch.embedding, changes=_needs_other_ranks)
def _embedding(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each rank looks up the rows that it holds and takes zeros for the others; the result is Partial.

    It is a plain ``Partial(sum)``, which every op understands; stock DTensor's result is a masked one, which only a
    redistribution does. If the rows of the table are not sharded, DTensor's own rule is used, except with
    ``scale_grad_by_freq``, which counts rows in the whole batch: the indices are gathered.

    Raises:
        IndexBoundsError: an index that no rank has a row for.
        UnsupportedOpError: ``max_norm`` on a table with sharded rows, or together with ``scale_grad_by_freq``.
    """
    call = _Call.of(func, args, kwargs)
    weight, indices, padding = call.weight, call.indices, call.padding
    is_placed = isinstance(weight, DTensor) and isinstance(indices, DTensor)
    if not is_placed or not _needs_other_ranks(func, args, kwargs):
        return func(*args, **kwargs)
    if call.renorms:
        raise UnsupportedOpError(
            f"{_OP}: max_norm with a table of placements {tuple(weight.placements)} and indices of placements "
            f"{tuple(indices.placements)} needs rows of other ranks; remove max_norm, or replicate both"
        )
    padding = padding + weight.shape[0] if padding is not None and padding < 0 else padding
    return _lookup(context, weight, indices, padding, call.counts)


def _lookup(context: OpContext, weight: DTensor, indices: DTensor, padding: int | None, counts: bool) -> DTensor:
    mesh = context.mesh
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
        require_in_bounds(local_indices, weight.shape[0], _OP, "check the tokenizer, or the table's number of rows")
        table = enter_local(weight, grads)
        local = _local_lookup(table, local_indices, ranges, padding)
        if counts and local.requires_grad:
            whole = local_of(bring(indices, (Replicate(),) * mesh.ndim, _OP, "indices"))
            times = torch.bincount(whole.reshape(-1), minlength=weight.shape[0])[local_indices].unsqueeze(-1)
            local.register_hook(lambda grad: grad / times)
        return leave_local(local, mesh, out, (*indices.shape, weight.shape[1]), _OP)


def _local_lookup(
    table: torch.Tensor, indices: torch.Tensor, ranges: tuple[tuple[int, int], ...], padding: int | None
) -> torch.Tensor:
    """Rows of the local table, which holds the global rows ``ranges``; zeros without a gradient for all other rows."""
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


@replaces(F.embedding_bag)
def _embedding_bag(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes its bags of equal length, ``(batch, length)``, with the whole table. Bags that are concatenated,
    with offsets, are gathered to every rank.

    Raises:
        NotImplementedError: ``max_norm`` or ``scale_grad_by_freq`` over sharded bags, which depend on other bags.
    """
    call = _BAG_SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    bags, table = options["input"], options["weight"]
    if not isinstance(table, DTensor):  # outside of the model's own parameters
        return func(*args, **kwargs)
    mesh, name = table.device_mesh, "embedding_bag"
    rows = sharded_rows(bags, 0) if bags.ndim == 2 else [False] * mesh.ndim
    if any(rows) and (options["max_norm"] is not None or options["scale_grad_by_freq"]):
        raise UnsupportedOpError(
            f"{name}: max_norm and scale_grad_by_freq over bags of shape {tuple(bags.shape)} with placements "
            f"{tuple(bags.placements)} need the bags of other ranks; remove them, or write R for the module's <in>"
        )
    for operand in ("input", "offsets", "per_sample_weights"):
        if isinstance(options[operand], DTensor):
            options[operand] = local_rows(options[operand], rows, 0, name, operand)
    options["weight"] = local_parameter(table, rows, name)
    with no_torch_function():
        local = func(*call.args, **call.kwargs)
    num_bags = bags.shape[0] if bags.ndim == 2 else local.shape[0]
    return rows_from_local(local, 0, num_bags, mesh, rows, name)
