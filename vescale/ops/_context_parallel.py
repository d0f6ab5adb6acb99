"""Attention over a sharded sequence (context parallelism): what is communicated, and which keys each query attends to.

There are three methods; a plan's ``attention`` entries choose one for each axis:

==============  ===========================================================  ==============================================
method          before the kernel                                            after it
==============  ===========================================================  ==============================================
``all_gather``  an all-gather of keys and values, packed                     nothing; their gradients are reduce-scattered
``ring``        nothing; blocks of keys and values are passed round during   nothing; their gradients are passed round, too
                attention (:mod:`vescale.ops._ring_attention`)
``ulysses``     an all-to-all each: queries, keys and values are sharded     an all-to-all: the result is sharded over the
                over heads instead of the sequence                           sequence again
==============  ===========================================================  ==============================================

Positions are global: a rank that holds rows 4 to 7 computes for these rows what one device does. An interleaved sequence
(``Interleaved(1, 8)``) balances causal attention: each rank then has early and late rows, nothing is permuted, and a piece
attends only to the keys up to its own end.

Source: Ulysses: Jacobs et al., arXiv:2309.14509; gathered keys and values: the Llama 3 report, arXiv:2407.21783, 3.3.2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import axis_group
from vescale.compat import DTensorSpec, no_torch_function
from vescale.compat.devices import WITH_LOWER_RIGHT_MASKS
from vescale.ops._context import OpContext
from vescale.ops._conversion import convert, enter_local, leave_local
from vescale.ops._ring_attention import Ring, RingSchedule, Runs
from vescale.placements import InterleavedShard, at_dim, local_region, shard_dim


def sequence_axes(query: DTensor | DTensorSpec) -> tuple[int, ...]:
    """Mesh axes that shard the rows of the query."""
    mesh, rows = query.device_mesh, query.ndim - 2
    return tuple(a for a, p in enumerate(query.placements) if shard_dim(p) == rows and mesh.size(a) > 1)


# all_gather


def gather_pair(key: DTensor, value: DTensor, axes: Sequence[int], requester: str) -> tuple[DTensor, DTensor]:
    """Keys and values, gathered along ``axes``; in one collective, packed side by side, if their placements are equal.

    Their gradients arrive Partial on these axes, and are reduce-scattered, packed as well.
    """
    target = tuple(Replicate() if axis in axes else None for axis in range(key.device_mesh.ndim))
    packable = key.placements == value.placements and key.shape[:-1] == value.shape[:-1] and key.dtype == value.dtype
    if not packable or any(shard_dim(p) == key.ndim - 1 for p in key.placements):
        return convert(key, target, requester=requester), convert(value, target, requester=requester)
    with no_torch_function():
        packed = torch.cat([enter_local(key), enter_local(value)], -1)
    sizes = [key.shape[-1], value.shape[-1]]
    whole = convert(
        leave_local(packed, key.device_mesh, key.placements, (*key.shape[:-1], sum(sizes)), requester),
        target,
        requester=requester,
    )
    summed = tuple(Partial() if axis in axes else p for axis, p in enumerate(whole.placements))
    with no_torch_function():
        parts = enter_local(whole, summed).split(sizes, -1)
    made = [
        leave_local(part, key.device_mesh, whole.placements, (*key.shape[:-1], size), requester, summed)
        for part, size in zip(parts, sizes)
    ]
    return made[0], made[1]


# ring


def shard_value_as_key(key: DTensor, value: DTensor, axes: Sequence[int], requester: str) -> DTensor:
    """The value, redistributed along ``axes`` to the placements of the key."""
    rows = key.ndim - 2
    target = [at_dim(p, value.ndim - 2) if shard_dim(p) == rows else p for p in key.placements]
    if all(target[axis] == value.placements[axis] for axis in axes):
        return value
    return convert(value, [target[axis] if axis in axes else None for axis in range(len(target))], requester=requester)


def ring_of(query: DTensor, key: DTensor, axes: Sequence[int], is_causal: bool, requester: str) -> Ring:
    """The ring of this rank over the mesh axes ``axes``; a process group over several axes is created once."""
    group = axis_group(query.device_mesh, axes)
    rows, keys = (tuple(_runs(x, at) for at in group.coordinates) for x in (query, key))
    return Ring(group, ring_schedule(rows, keys, is_causal), requester)


@functools.lru_cache(maxsize=256)
def ring_schedule(rows: tuple[Runs, ...], keys: tuple[Runs, ...], is_causal: bool) -> RingSchedule:
    return RingSchedule(rows, keys, is_causal)


def _runs(x: DTensor, coordinate: tuple[int, ...]) -> Runs:
    """The positions that the rank at ``coordinate`` holds."""
    region = local_region(tuple(x.shape), tuple(x.placements), tuple(x.device_mesh.shape), coordinate)
    return tuple((run[0], run[-1]) for run in region.intervals[x.ndim - 2] if run[0] < run[-1])


# ulysses


def shard_heads(context: OpContext, x: DTensor, axis: int, what: str, requester: str) -> DTensor:
    """The query, key or value (``what``), sharded over heads instead of the sequence along mesh axis ``axis``.

    Keys and values with fewer heads than ranks are gathered instead; each rank then uses the heads of its query heads.
    Raises a PlanError, on every rank before any communication, if the ranks do not divide the heads of the query.
    """
    heads, mesh = x.ndim - 3, x.device_mesh
    others = [a for a, p in enumerate(x.placements) if a != axis and shard_dim(p) == heads]
    num_ranks = mesh.size(axis) * math.prod(mesh.size(a) for a in others)
    if x.ndim < 3 or (what == "query" and x.shape[heads] % num_ranks):
        raise context.plan_error(
            f"{requester}: the {what} of shape {tuple(x.shape)} has {x.shape[heads] if x.ndim >= 3 else 0} heads, which "
            f"{num_ranks} ranks do not divide; write ring or all_gather for this axis, or use fewer ranks"
        )
    if x.shape[heads] % num_ranks:
        placement: Placement = Replicate()
    else:
        # Later axes shard what this one leaves; theirs is the outer split, so that nothing changes along them.
        inner = math.prod(mesh.size(a) for a in others if a > axis)
        placement = Shard(heads) if inner == 1 else InterleavedShard(heads, inner)
    target = [placement if a == axis else None for a in range(mesh.ndim)]
    return convert(x, target, requester=requester)


def shard_sequence(x: DTensor, placements: Sequence[Placement], axes: Sequence[int], requester: str) -> DTensor:
    """The result, sharded over the sequence again as the query was."""
    return convert(x, [placements[a] if a in axes else None for a in range(len(placements))], requester=requester)


# Causal attention of some rows


def causal_rows(runs: Sequence[tuple[int, int]], num_keys: int, device: torch.device) -> torch.Tensor:
    """A bool matrix (rows, keys): which of ``num_keys`` keys the global rows ``runs`` attend to; row i to keys 0 to i."""
    rows = [torch.arange(start, stop, device=device) for start, stop in runs]
    index = torch.cat(rows) if rows else torch.arange(0, device=device)
    return torch.arange(num_keys, device=device) <= index.unsqueeze(1)


def causal_mask(met: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """``met`` combined with the mask that the call has beside ``is_causal``."""
    if mask is None:
        return met
    return met & mask if mask.dtype == torch.bool else mask.masked_fill(~met, -math.inf)


def attend_to_prefixes(
    func: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[tuple[int, int]],
    options: dict[str, Any],
) -> torch.Tensor:
    """Causal attention of the global rows ``runs``, which are concatenated in ``query``, to keys from position 0 on.

    Each run attends to the keys up to its own end, so that the work of a rank is that of its rows.
    """
    options = {name: option for name, option in options.items() if name != "is_causal"}
    results, offset = [], 0
    for start, stop in runs:
        rows = query.narrow(-2, offset, stop - start)
        offset += stop - start
        keys, values = (x.narrow(-2, 0, min(stop, x.shape[-2])) for x in (key, value))
        if start == 0:
            results.append(func(rows, keys, values, is_causal=True, **options))
        elif query.device.type in WITH_LOWER_RIGHT_MASKS and stop <= key.shape[-2] and not options["enable_gqa"]:
            from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo, a second for every process

            results.append(func(rows, keys, values, attn_mask=causal_lower_right(stop - start, stop), **options))
        else:
            mask = causal_rows([(start, stop)], keys.shape[-2], query.device)
            results.append(func(rows, keys, values, attn_mask=mask, **options))
    if not results:
        return func(query, key, value, **options)
    return results[0] if len(results) == 1 else torch.cat(results, -2)
