"""``F.scaled_dot_product_attention`` on DTensors: one local kernel on each rank, split over batch, heads and query rows.

Along each mesh axis the work is split over a leading dim (batch or heads) that some operand shards, or over the rows of the
query, if these are sharded; :mod:`vescale.ops._context_parallel` describes what is communicated then.

=========================  =============================================================================================
operand on a split axis    use
=========================  =============================================================================================
sharded on the split dim   its local part
Replicate, size 1 there    the whole operand (a mask for all heads); its gradient is Partial
Replicate                  a local slice; its gradient is Partial
k, v on an axis of rows    gathered (``all_gather`` in the plan's attention section; without it this is implicit
                           communication), or used block by block (``ring``)
mask on an axis of rows    its rows, or a local slice of them
k, v with fewer heads      the heads of this rank's query heads; the gradient is Partial where k and v are Replicate (fewer
                           heads than ranks)
anything else              redistributed first: implicit communication
=========================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, no_torch_function, spec_of
from vescale.ops._attention_work import ATTENTION, ROWS, AttentionWork
from vescale.ops._context import OpContext
from vescale.ops._context_parallel import (
    attend_to_prefixes,
    causal_mask,
    causal_rows,
    gather_pair,
    ring_of,
    sequence_axes,
    shard_heads,
    shard_sequence,
    shard_value_as_key,
)
from vescale.ops._conversion import convert, enter_together, leave_local
from vescale.ops._registration import replaces
from vescale.ops._ring_attention import ring_attention
from vescale.placements import shard_dim
from vescale.rng import drawing_part_of, draws_rows

__all__: list[str] = []

Ready = tuple[tuple[Placement, ...], tuple[tuple[Placement, ...], ...]]


def _is_local(*args: Any, **kwargs: Any) -> bool:
    query, key, value, mask, options = _arguments(*args, **kwargs)
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    is_given = all(isinstance(x, DTensor) for x in operands)
    return is_given and not options["dropout_p"] and _ready(tuple(map(spec_of, operands))) is not None


@replaces(
    F.scaled_dot_product_attention,
    is_local=_is_local,
    backward="custom",
    communicates=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
)
def _attention(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Scaled dot product attention; see the module's table. Shapes as in torch: ``(..., heads, length, head size)``.

    With dropout each rank draws its part of one device's mask. Fused kernels draw by local index, and are refused where the
    work is split.
    """
    query, key, value, mask, options = _arguments(*args, **kwargs)
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    if not options["dropout_p"] and (ready := _ready(tuple(map(spec_of, operands)))):
        return _attend_in_place(func, operands, *ready, options)
    rows = sequence_axes(query)
    methods = context.attention_methods() if rows else ()
    ulysses_axes = [axis for axis in rows if methods[axis] == "ulysses"]
    given = tuple(query.placements)
    for axis in ulysses_axes:
        requester = f"attention: ulysses on {context.axis_names[axis]}"
        query, key, value = (
            shard_heads(context, x, axis, name, requester)
            for x, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        if mask is not None and shard_dim(mask.placements[axis]) == mask.ndim - 2:
            target = [Replicate() if a == axis else None for a in range(mask.device_mesh.ndim)]
            mask = convert(mask, target, requester=requester)
    gathered = [axis for axis in rows if methods[axis] == "all_gather"]
    if gathered:
        names = ",".join(context.axis_names[axis] for axis in gathered)
        key, value = gather_pair(key, value, gathered, f"attention: all_gather on {names}")
    ring_axes = [axis for axis in rows if methods[axis] == "ring" and _shards_rows(axis, key, value)]
    if ring_axes:
        names = ",".join(context.axis_names[axis] for axis in ring_axes)
        value = shard_value_as_key(key, value, ring_axes, f"attention: ring on {names}")
    out = _attend(context, func, query, key, value, mask, options, ring_axes)
    return shard_sequence(out, given, ulysses_axes, f"attention: {ATTENTION}") if ulysses_axes else out


def _arguments(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: DTensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[DTensor, DTensor, DTensor, DTensor | None, dict[str, Any]]:
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is not None and is_causal:  # one device raises, since torch 2.14; split over rows, the two become one mask
        with no_torch_function():
            x = torch.zeros(1, 1, 2, 8)
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(2, 2), is_causal=True)
    return query, key, value, attn_mask, options


def _ready(specs: tuple[DTensorSpec, ...]) -> Ready | None:
    """The placements of the result, and of the operands' gradients, if the local parts of operands with these specs are used
    as they are; None: something has to be moved or cut, or rows are sharded."""
    # Equal specs are mostly one object, and comparing them takes longer than the rest. Entries keep their specs alive.
    found = _READY.get(key := tuple(map(id, specs)))
    if found is None:
        if len(_READY) >= 256:
            _READY.clear()
        _READY[key] = found = specs, _decided(specs)
    return found[1]


_READY: dict[tuple[int, ...], tuple[tuple[DTensorSpec, ...], Ready | None]] = {}


def _decided(specs: tuple[DTensorSpec, ...]) -> Ready | None:
    if sequence_axes(specs[0]):
        return None
    work = AttentionWork.of(*specs)
    uses = [work.use(spec, name) for spec, name in zip(specs, ("query", "key", "value", "attn_mask"))]
    if any(tuple(spec.placements) != use.placements or use.cuts for spec, use in zip(specs, uses)):
        return None
    return work.placements, tuple(use.grads for use in uses)


def _attend_in_place(
    func: Any,
    operands: Sequence[DTensor],
    placements: tuple[Placement, ...],
    grads: tuple[tuple[Placement, ...], ...],
    options: dict[str, Any],
) -> DTensor:
    """One local kernel on the local parts as they are."""
    query, _, value = operands[:3]
    q, k, v, *mask = enter_together(operands, grads)
    options["enable_gqa"] = options["enable_gqa"] and q.ndim > 3 and q.shape[-3] != k.shape[-3]
    with no_torch_function():
        out = func(q, k, v, attn_mask=mask[0] if mask else None, **options)
    return leave_local(out, query.device_mesh, placements, (*query.shape[:-1], value.shape[-1]), ATTENTION)


def _attend(
    context: OpContext,
    func: Any,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    mask: DTensor | None,
    options: dict[str, Any],
    ring_axes: Sequence[int],
) -> DTensor:
    """One local kernel, or ring attention over ``ring_axes``, after the exchanges of the other methods."""
    work = AttentionWork.of(query, key, value, mask, ring_axes=ring_axes)
    q, k, v = (work.operand(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    m = work.operand(mask, "attn_mask") if mask is not None else None
    options["enable_gqa"] = options["enable_gqa"] and q.ndim > 3 and q.shape[-3] != k.shape[-3]
    is_split = any(split is not None for split in work.splits)
    result_shape = (*query.shape[:-1], value.shape[-1])
    if ring_axes:
        out = _attend_in_ring(work, q, k, v, m, (query, key), options)
        return leave_local(out, context.mesh, work.placements, result_shape, ATTENTION)
    runs = work.held(work.shape, work.placements, ROWS) if ROWS in work.splits and options["is_causal"] else None
    if runs is not None and options["dropout_p"] == 0 and m is None:
        out = attend_to_prefixes(func, q, k, v, runs, options)
        return leave_local(out, context.mesh, work.placements, result_shape, ATTENTION)
    with no_torch_function():
        if runs is not None:  # the mask of dropout, and a given one, have a number for every key
            m, options["is_causal"] = causal_mask(causal_rows(runs, k.shape[-2], k.device), m), False
        if options["dropout_p"] > 0 and (is_split or draws_rows()):
            weights = (*query.shape[:-1], key.shape[-2])
            with drawing_part_of(context.mesh, work.placements, weights) as draws:
                out = func(q, k, v, attn_mask=m, **options)
            if not draws.count:  # no queries here: the kernel skips the dropout
                draws.advance(lambda weights: F.dropout(weights, options["dropout_p"]), q.dtype, q.device)
        else:
            out = func(q, k, v, attn_mask=m, **options)
    return leave_local(out, context.mesh, work.placements, result_shape, ATTENTION)


def _attend_in_ring(
    work: AttentionWork,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    given: tuple[DTensor, DTensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """``given``: the global query and key. The weights that dropout keeps are drawn at once, one byte each."""
    query, key = given
    names = work.mesh.mesh_dim_names or ()
    requester = f"attention: ring on {','.join(names[axis] for axis in work.ring_axes)}"
    dropout = options["dropout_p"]
    with no_torch_function():
        ring = ring_of(query, key, work.ring_axes, options["is_causal"], requester)
        kept = None
        if dropout > 0:
            weights = (*query.shape[:-1], key.shape[-2])
            with drawing_part_of(work.mesh, work.placements, weights) as draws:
                kept = F.dropout(q.new_ones((*q.shape[:-1], key.shape[-2]), requires_grad=False), dropout) != 0
            if not draws.count:
                draws.advance(lambda part: F.dropout(part, dropout), q.dtype, q.device)
        return ring_attention(
            ring, q, k, v, mask, kept, scale=options["scale"], dropout=dropout, grouped=options["enable_gqa"]
        )


def _shards_rows(axis: int, *operands: DTensor) -> bool:
    return any(shard_dim(x.placements[axis]) == x.ndim - 2 for x in operands)
