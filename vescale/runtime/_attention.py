"""``F.scaled_dot_product_attention`` on DTensors: one local kernel on each rank, split over batch, heads and query rows.

Along each mesh axis the work is split over one leading dim (batch or heads), where any operand is sharded so; or over the
rows of the query, where these are cut: :mod:`vescale.runtime._sequence` says what is exchanged then.

=========================  =============================================================================================
operand on a split axis    what is done
=========================  =============================================================================================
sharded on the split dim   its part is used
Replicate, size 1 there    used whole (a mask that all heads share); its gradient is Partial
Replicate                  this rank's part is cut from it; its gradient is Partial
k, v on an axis of rows    gathered (``all_gather``, in the plan's attention section; implicit communication without it),
                           or used block by block (``ring``)
mask on an axis of rows    its rows are used, or cut from it
k, v with fewer heads      the heads that this rank's query heads attend with; the gradient is Partial when k, v are
                           Replicate (fewer heads than ranks)
anything else              redistributed first: implicit communication
=========================  =============================================================================================
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, no_torch_function
from vescale.ops import convert, enter_local, leave_local, report_implicit_move, running_module
from vescale.placements import InterleavedShard, local_region, shard_dim, split_factor
from vescale.rng import drawing_part_of
from vescale.runtime._ring import ring_attention
from vescale.runtime._sequence import (
    attend_to_prefixes,
    causal_mask,
    causal_rows,
    exchange,
    exchange_back,
    gather_pair,
    lie_alike,
    ring_of,
    sequence_axes,
)

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["attention"]

_OP = "scaled_dot_product_attention"
_ROWS = -2  # the dim, counted from the back, of the query's positions
_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("query", inspect.Parameter.empty),
            ("key", inspect.Parameter.empty),
            ("value", inspect.Parameter.empty),
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        )
    ]
)


def attention(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Scaled dot product attention; see the module's table. Shapes as in torch: ``(..., heads, length, head size)``.

    With dropout, each rank draws its part of the mask of one device; fused kernels, which draw by local index, are refused
    where the work is split.
    """
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    query, key, value, mask = (options.pop(name) for name in ("query", "key", "value", "attn_mask"))
    rows = sequence_axes(query)
    methods = runtime.attention_methods() if rows else ()
    exchanged = [axis for axis in rows if methods[axis] == "ulysses"]
    given = tuple(query.placements)
    for axis in exchanged:
        requester = f"attention: ulysses on {runtime.axes.names[axis]}"
        query, key, value = (
            exchange(x, axis, name, requester) for x, name in ((query, "query"), (key, "key"), (value, "value"))
        )
        if mask is not None and shard_dim(mask.placements[axis]) == mask.ndim - 2:
            target = [Replicate() if a == axis else None for a in range(mask.device_mesh.ndim)]
            mask = convert(mask, target, requester=requester)
    gathered = [axis for axis in rows if methods[axis] == "all_gather"]
    if gathered:
        names = ",".join(runtime.axes.names[axis] for axis in gathered)
        key, value = gather_pair(key, value, gathered, f"attention: all_gather on {names}")
    turning = [axis for axis in rows if methods[axis] == "ring" and _cuts_rows(axis, key, value)]
    if turning:
        names = ",".join(runtime.axes.names[axis] for axis in turning)
        value = lie_alike(key, value, turning, f"attention: ring on {names}")
    out = _attend(runtime, func, query, key, value, mask, options, turning)
    return exchange_back(out, given, exchanged, f"attention: {_OP}") if exchanged else out


def _attend(
    runtime: Runtime,
    func: Any,
    query: DTensor,
    key: DTensor,
    value: DTensor,
    mask: DTensor | None,
    options: dict[str, Any],
    turning: Sequence[int],
) -> DTensor:
    """One local kernel, or a ring over the axes ``turning``; its operands lie as the methods of the axes left them."""
    work = _Work.of(query, key, value, mask, turning=turning)
    q, k, v = (work.operand(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    m = work.operand(mask, "attn_mask") if mask is not None else None
    options["enable_gqa"] = options["enable_gqa"] and q.ndim > 3 and q.shape[-3] != k.shape[-3]
    is_split = any(split is not None for split in work.splits)
    result_shape = (*query.shape[:-1], value.shape[-1])
    if turning:
        out = _attend_in_ring(work, q, k, v, m, (query, key), options)
        return leave_local(out, runtime.mesh, work.placements, result_shape, _OP)
    runs = work.held(work.shape, work.placements, _ROWS) if _ROWS in work.splits and options["is_causal"] else None
    if runs is not None and options["dropout_p"] == 0 and m is None:
        out = attend_to_prefixes(func, q, k, v, runs, options)
        return leave_local(out, runtime.mesh, work.placements, result_shape, _OP)
    with no_torch_function():
        if runs is not None:  # the mask of dropout, and a given one, have a number for every key
            m, options["is_causal"] = causal_mask(causal_rows(runs, k.shape[-2], k.device), m), False
        if options["dropout_p"] > 0 and is_split:
            weights = (*query.shape[:-1], key.shape[-2])
            with drawing_part_of(runtime.mesh, work.placements, weights) as draws:
                out = func(q, k, v, attn_mask=m, **options)
            if not draws.count:  # no queries here: the kernel skips the dropout
                draws.advance(lambda weights: F.dropout(weights, options["dropout_p"]), q.dtype, q.device)
        else:
            out = func(q, k, v, attn_mask=m, **options)
    return leave_local(out, runtime.mesh, work.placements, result_shape, _OP)


def _attend_in_ring(
    work: _Work,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    given: tuple[DTensor, DTensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """``given``: query and key as they lie. Which weights dropout keeps is drawn at once, a byte each."""
    query, key = given
    names = work.mesh.mesh_dim_names or ()
    requester = f"attention: ring on {','.join(names[axis] for axis in work.turning)}"
    dropout = options["dropout_p"]
    with no_torch_function():
        ring = ring_of(query, key, work.turning, options["is_causal"], requester)
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


def _cuts_rows(axis: int, *operands: DTensor) -> bool:
    return any(shard_dim(x.placements[axis]) == x.ndim - 2 for x in operands)


@dataclass(frozen=True)
class _Work:
    """How the work is split.

    Attributes:
        shape: the query's.
        splits: for each mesh axis the dim, counted from the back, over which it splits the work: a leading dim, or the rows
            of the query; None: not.
        placements: of the query and of the result.
        mesh: the operands' mesh.
        turning: axes along which keys and values come in turn, from the ranks that hold them.
    """

    shape: tuple[int, ...]
    splits: tuple[int | None, ...]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh
    turning: tuple[int, ...] = ()

    @classmethod
    def of(cls, query: DTensor, *others: DTensor | None, turning: Sequence[int] = ()) -> _Work:
        """The query decides where it is sharded; else the first operand that is."""
        splits: list[int | None] = []
        placements: list[Placement] = []
        rows = sequence_axes(query)
        for axis, own in enumerate(query.placements):
            split = next((d for x in (query, *others) if (d := _leading_shard(x, axis)) is not None), None)
            if axis in rows:
                split = _ROWS
            splits.append(split)
            if split is None:
                placements.append(Replicate())
            else:
                sharded_so = shard_dim(own) == query.ndim + split
                placements.append(own if sharded_so else Shard(query.ndim + split))
        return cls(tuple(query.shape), tuple(splits), tuple(placements), query.device_mesh, tuple(turning))

    def operand(self, x: DTensor, name: str) -> torch.Tensor:
        """This rank's part of an operand; redistributes it where it lies otherwise than the split can use."""
        kept = self._kept(x, name)
        wanted = tuple(own if axis in kept else Replicate() for axis, own in enumerate(x.placements))
        grads = [
            own if axis in kept or split is None else Partial()  # used whole, or cut here: the ranks' gradients add up
            for axis, (split, own) in enumerate(zip(self.splits, wanted))
        ]
        if tuple(x.placements) != wanted:
            report_implicit_move(_OP, name, local_of(x), x.placements, wanted, self._edit(x, wanted))
            # What is a sum of the ranks' gradients on the other axes goes back as one.
            moved = [None if own == target else target for own, target in zip(x.placements, wanted)]
            x = convert(x, moved, requester=f"implicit: {_OP}")
        local = enter_local(x, grads)
        for split in {split for split in self.splits if split is not None and _size(x, split) > 1}:
            if split == _ROWS and name in ("key", "value"):
                continue  # every row may meet every key
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            if x.shape[split] == self.shape[split] and all(wanted[axis] == self.placements[axis] for axis in axes):
                continue
            with no_torch_function():
                local = self._cut(local, x, split)
        return local

    def _kept(self, x: DTensor, name: str) -> set[int]:
        """Axes along which an operand stays as it is sharded: each rank has what its queries meet."""
        kept = {axis for axis in range(self.mesh.ndim) if self.mesh.size(axis) == 1}
        kept |= set(self.turning) if name in ("key", "value") else set()
        for split in {split for split in self.splits if split is not None}:
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            own = {axis: x.placements[axis] for axis in axes if shard_dim(x.placements[axis]) == x.ndim + split}
            if not own or (split == _ROWS and name in ("key", "value")):
                continue
            if _covers(
                x.shape[split],
                self.shape[split],
                tuple(_alone(own.get(axis, Replicate())) for axis in axes),
                tuple(_alone(self.placements[axis]) for axis in axes),
                tuple(self.mesh.size(axis) for axis in axes),
            ):
                kept |= set(own)
        return kept

    def _cut(self, local: torch.Tensor, x: DTensor, split: int) -> torch.Tensor:
        """What this rank's queries meet along a split dim: runs of it, or one key/value head for each query head where the
        heads of a rank share theirs unevenly."""
        runs = self.held(self.shape, self.placements, split)
        found = self.held(tuple(x.shape), tuple(x.placements), split)
        if len(found) > 1:
            raise NotImplementedError(
                f"{_OP}: dim {x.ndim + split} of an operand of shape {tuple(x.shape)} is cut into several runs by "
                f"{x.placements}, and the query's by {self.placements}; place query, key, value and mask alike"
            )
        first_held = found[0][0] if found else 0
        if len(runs) > 1:
            return torch.cat([self._cut_run(local, x, split, run, first_held) for run in runs], split)
        return self._cut_run(local, x, split, runs[0] if runs else (0, 0), first_held)

    def _cut_run(
        self, local: torch.Tensor, x: DTensor, split: int, run: tuple[int, int], first_held: int
    ) -> torch.Tensor:
        start, stop = run
        group = self.shape[split] // x.shape[split]  # query heads that share a key/value head
        first, last = start // group, max(stop - 1, start) // group + 1
        if last - first > 1 and (start % group or stop % group):
            heads = [head // group - first_held for head in range(start, stop)]
            return local.index_select(split, torch.tensor(heads, device=local.device))
        length = last - first if stop > start else 0
        return local if length == local.shape[split] else local.narrow(split, first - first_held, length)

    def held(self, shape: tuple[int, ...], placements: tuple[Placement, ...], split: int) -> list[tuple[int, int]]:
        """The global indices along a dim that this rank holds, as runs [start, stop)."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh run no forward
        region = local_region(shape, placements, tuple(self.mesh.shape), coordinate)
        return [(run[0], run[-1]) for run in region.intervals[len(shape) + split] if run[0] < run[-1]]

    def _edit(self, x: DTensor, wanted: Sequence[Placement]) -> str | None:
        """The plan line for keys and values that are gathered because the sequence is cut."""
        axes = [
            self.mesh.mesh_dim_names[axis]
            for axis, (own, target) in enumerate(zip(x.placements, wanted))
            if self.splits[axis] == _ROWS and own != target and self.mesh.mesh_dim_names
        ]
        if not axes:
            return None
        methods = ", ".join(f"{axis}: all_gather" for axis in axes)
        return f"write `'{running_module()}': {{{methods}}}` in the plan's attention section"


def _alone(placement: Placement) -> Placement:
    """The placement of a dim when it is the only one."""
    if shard_dim(placement) is None:
        return placement
    pieces = split_factor(placement)
    return Shard(0) if pieces == 1 else InterleavedShard(0, pieces)


@functools.lru_cache(maxsize=1024)
def _covers(
    size: int,
    query_size: int,
    placements: tuple[Placement, ...],
    query_placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
) -> bool:
    """Whether each rank's part of a dim of an operand has what its part of the query's dim meets; ``size`` indices, each
    shared by as many of the query's as there are to one."""
    if size == query_size and placements == query_placements:
        return True
    if query_size % size:
        return False
    group = query_size // size
    for coordinate in itertools.product(*map(range, mesh_shape)):
        (held,), (met,) = (
            local_region((n,), along, mesh_shape, coordinate).intervals
            for n, along in ((size, placements), (query_size, query_placements))
        )
        for start, stop in met:
            if start < stop and not any(a <= start // group and (stop - 1) // group < b for a, b in held):
                return False
    return True


def _leading_shard(x: DTensor | None, axis: int) -> int | None:
    """The leading dim, counted from the back, that an operand is sharded on along a mesh axis."""
    if x is None:
        return None
    dim = shard_dim(x.placements[axis])
    return dim - x.ndim if dim is not None and dim - x.ndim < -2 and x.shape[dim] > 1 else None


def _size(x: DTensor, split: int) -> int:
    return x.shape[split] if -split <= x.ndim else 1
