"""``F.scaled_dot_product_attention`` on DTensors: one local kernel on each rank, split over batch, heads and query rows.

Along each mesh axis the work is split over a leading dim (batch or heads) that some operand shards, or over the rows of the
query, if these are sharded; :mod:`vescale.ops.attention` describes what is communicated then.

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

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import axis_group
from vescale.compat import DTensorSpec, local_of, no_torch_function, spec_of
from vescale.compat.devices import WITH_LOWER_RIGHT_MASKS
from vescale.errors import UnsupportedOpError
from vescale.ops._conversion import convert, enter_local, enter_together, leave_local
from vescale.ops._observer import report_implicit_move, running_module
from vescale.ops._registry import OpContext, replaces
from vescale.ops._ring_attention import Ring, RingSchedule, Runs, ring_attention
from vescale.placements import InterleavedShard, at_dim, local_region, shard_dim, split_factor
from vescale.rng import drawing_part_of, draws_rows

# Attention over a sharded sequence (context parallelism): what is communicated, and which keys each query attends to.
#
# There are three methods; a plan's ``attention`` entries choose one for each axis:
#
# ==============  ===========================================================  ==============================================
# method          before the kernel                                            after it
# ==============  ===========================================================  ==============================================
# ``all_gather``  an all-gather of keys and values, packed                     nothing; their gradients are reduce-scattered
# ``ring``        nothing; blocks of keys and values are passed round during   nothing; their gradients are passed round, too
#                 attention (:mod:`vescale.ops._ring_attention`)
# ``ulysses``     an all-to-all each: queries, keys and values are sharded     an all-to-all: the result is sharded over the
#                 over heads instead of the sequence                           sequence again
# ==============  ===========================================================  ==============================================
#
# Positions are global: a rank that holds rows 4 to 7 computes for these rows what one device does. An interleaved sequence
# (``Interleaved(1, 8)``) balances causal attention: each rank then has early and late rows, nothing is permuted, and a piece
# attends only to the keys up to its own end.
#
# Source: Ulysses: Jacobs et al., arXiv:2309.14509; gathered keys and values: the Llama 3 report, arXiv:2407.21783, 3.3.2.


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


# How the work of an attention on DTensors is split, and how each operand is used then; see
# :mod:`vescale.ops.attention`.

ATTENTION = "scaled_dot_product_attention"
ROWS = -2  # the dim, counted from the back, of the query's positions


@dataclass(frozen=True)
class OperandUse:
    """An operand's placements while the kernel runs, those of its local gradient, and the dims that are cut to this rank's
    part of the work."""

    placements: tuple[Placement, ...]
    grads: tuple[Placement, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class AttentionWork:
    """How the work is split.

    Attributes:
        shape: of the query.
        splits: for each mesh axis the dim, counted from the back, over which it splits the work (a leading dim, or the rows
            of the query), or None.
        placements: of the query and of the result.
        mesh: of the operands.
        ring_axes: axes along which blocks of keys and values are passed round.
    """

    shape: tuple[int, ...]
    splits: tuple[int | None, ...]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh
    ring_axes: tuple[int, ...] = ()
    # By id of an operand's spec, which the value keeps alive, and the operand's name.
    _uses: dict[tuple[int, str], tuple[DTensorSpec, OperandUse]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, query: DTensor | DTensorSpec, *others: DTensor | DTensorSpec | None, ring_axes: Sequence[int] = ()
    ) -> AttentionWork:
        """Along each axis the query determines the split if it is sharded there, else the first operand that is."""
        specs = tuple(spec_of(x) if isinstance(x, DTensor) else x for x in (query, *others))
        key = len(specs), *map(id, specs), *ring_axes
        found = _WORKS.get(key)
        if found is None:
            if len(_WORKS) >= _MAX_WORKS:
                _WORKS.clear()
            found = _WORKS[key] = specs, cls._of(*specs, ring_axes=ring_axes)  # type: ignore[arg-type]
        return found[1]

    @classmethod
    def _of(cls, query: DTensorSpec, *others: DTensorSpec | None, ring_axes: Sequence[int]) -> AttentionWork:
        splits: list[int | None] = []
        placements: list[Placement] = []
        rows = sequence_axes(query)
        for axis, own in enumerate(query.placements):
            split = next((d for x in (query, *others) if (d := _leading_shard(x, axis, query)) is not None), None)
            if axis in rows:
                split = ROWS
            splits.append(split)
            if split is None:
                placements.append(Replicate())
            else:
                sharded_so = shard_dim(own) == query.ndim + split
                placements.append(own if sharded_so else Shard(query.ndim + split))
        return cls(tuple(query.shape), tuple(splits), tuple(placements), query.device_mesh, tuple(ring_axes))

    def use(self, x: DTensor | DTensorSpec, name: str) -> OperandUse:
        """How an operand is used."""
        spec = spec_of(x) if isinstance(x, DTensor) else x
        found = self._uses.get((id(spec), name))
        if found is None:
            if len(self._uses) >= _MAX_WORKS:
                self._uses.clear()
            found = self._uses[id(spec), name] = spec, self._use(spec, name)
        return found[1]

    def _use(self, x: DTensorSpec, name: str) -> OperandUse:
        kept = self._kept(x, name)
        wanted = tuple(own if axis in kept else Replicate() for axis, own in enumerate(x.placements))
        grads = tuple(
            own if axis in kept or split is None else Partial()  # used whole, or sliced: the gradients add up
            for axis, (split, own) in enumerate(zip(self.splits, wanted))
        )
        cuts = []
        for split in {
            s for s in self.splits if s is not None and (_size(x, s) > 1 or self.shape[s] == 1 <= _size(x, s))
        }:
            if split == ROWS and name in ("key", "value"):
                continue  # any row may attend to any key
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            if x.shape[split] == self.shape[split] and all(wanted[axis] == self.placements[axis] for axis in axes):
                continue
            cuts.append(split)
        return OperandUse(wanted, grads, tuple(cuts))

    def operand(self, x: DTensor, name: str) -> torch.Tensor:
        """The local part of an operand, which is redistributed first where the split cannot use its placement."""
        use = self.use(x, name)
        if tuple(x.placements) != (wanted := use.placements):
            report_implicit_move(ATTENTION, name, local_of(x), x.placements, wanted, self._edit(x, wanted))
            # On the other axes, Partial gradients stay Partial.
            moved = [None if own == target else target for own, target in zip(x.placements, wanted)]
            x = convert(x, moved, requester=f"implicit: {ATTENTION}")
        local = enter_local(x, use.grads)
        for split in use.cuts:
            with no_torch_function():
                local = self._cut(local, x, split)
        return local

    def _kept(self, x: DTensorSpec, name: str) -> set[int]:
        """Axes along which an operand stays sharded, because each rank has all that its queries attend to."""
        kept = {axis for axis in range(self.mesh.ndim) if self.mesh.size(axis) == 1}
        kept |= set(self.ring_axes) if name in ("key", "value") else set()
        for split in {split for split in self.splits if split is not None}:
            axes = [axis for axis, other in enumerate(self.splits) if other == split]
            own = {axis: x.placements[axis] for axis in axes if shard_dim(x.placements[axis]) == x.ndim + split}
            if not own or (split == ROWS and name in ("key", "value")):
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
        """The part along a split dim that this rank's queries use: runs of indices, or one key/value head for each query
        head if the heads of a rank are shared unevenly."""
        runs = self.held(self.shape, self.placements, split)
        found = self.held(tuple(x.shape), tuple(x.placements), split)
        if len(found) > 1:
            raise UnsupportedOpError(
                f"{ATTENTION}: dim {x.ndim + split} of an operand of shape {tuple(x.shape)} is split into several "
                f"runs by {x.placements}, and the query's by {self.placements}; use the same placements for query, "
                "key, value and mask"
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
        """The global indices along a dim that this rank holds, as intervals [start, stop)."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh run no forward
        region = local_region(shape, placements, tuple(self.mesh.shape), coordinate)
        return [(run[0], run[-1]) for run in region.intervals[len(shape) + split] if run[0] < run[-1]]

    def _edit(self, x: DTensor, wanted: Sequence[Placement]) -> str | None:
        """The plan entry for keys and values that are gathered because the sequence is sharded."""
        axes = [
            self.mesh.mesh_dim_names[axis]
            for axis, (own, target) in enumerate(zip(x.placements, wanted))
            if self.splits[axis] == ROWS and own != target and self.mesh.mesh_dim_names
        ]
        if not axes:
            return None
        methods = ", ".join(f"{axis}: all_gather" for axis in axes)
        return f"write `'{running_module()}': {{{methods}}}` in the plan's attention section"


# By ids of the operands' specs, which the values keep alive (equal specs are mostly one object), and the axes of the ring.
_WORKS: dict[tuple[int, ...], tuple[tuple[DTensorSpec | None, ...], AttentionWork]] = {}
_MAX_WORKS = 256


def _alone(placement: Placement) -> Placement:
    """The same placement for a tensor that has only the sharded dim."""
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
    """Whether each rank's part of a dim covers its part of the query's dim. Each of the ``size`` indices of the operand is
    shared by ``query_size / size`` consecutive indices of the query."""
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


def _leading_shard(x: DTensor | DTensorSpec | None, axis: int, query: DTensor | DTensorSpec) -> int | None:
    """The leading dim, counted from the back, that an operand is sharded on along a mesh axis. One of size 1 is broadcast,
    except where the query's has this size, too."""
    if x is None:
        return None
    dim = shard_dim(x.placements[axis])
    if dim is None or dim - x.ndim >= -2:
        return None
    is_broadcast = x.shape[dim] == 1 and (dim - x.ndim < -query.ndim or query.shape[dim - x.ndim] > 1)
    return None if is_broadcast else dim - x.ndim


def _size(x: DTensor | DTensorSpec, split: int) -> int:
    return x.shape[split] if -split <= x.ndim else 1


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
    cut = {axis for x in (key, value) for axis, p in enumerate(x.placements) if shard_dim(p) == x.ndim - 2}
    ring_axes = [axis for axis in rows if methods[axis] == "ring" and axis in cut]
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
    if attn_mask is not None and is_causal:
        # One device raises, a CPU since torch 2.14; split over rows, the two become one mask.
        with no_torch_function():
            x = torch.zeros(1, 1, 2, 8, dtype=query.dtype, device=query.device)
            F.scaled_dot_product_attention(x, x, x, attn_mask=x[0, 0, :, :2], is_causal=True)
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
