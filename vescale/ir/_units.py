"""Units: which parameters are gathered together, around which module's forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Layout, TensorGroup
from vescale.comm import (
    DEFAULT_BUCKET_BYTES,
    ReductionCost,
    bucket_limits,
    link_of,
    per_axis_bytes,
    plan_buckets,
    reduction_cost,
)
from vescale.compat import reduce_dtype_of
from vescale.ir._findings import Findings, name_list
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._program import Place, Program, Unit
from vescale.ir._resolve import PlannedState, Resolution, shown_name
from vescale.placements import RaggedShard, local_region, shard_dim
from vescale.plans import MeshAxes, PrecisionEntry, Source, UnitEntry, placement_text

# Sharding over several axes at once, for parameters of units that are sharded over these axes at rest and whole on each
# while they run. A ragged shard comes last, so that a DTensor can have one only. The same ragged placement on several
# axes at rest therefore means one shard over all their ranks together, in the order of the mesh; the parameter is then
# on a mesh in which one axis, behind the others, takes their place (:func:`vescale.comm.join_axes`). The same
# ``Shard(dim)`` on several axes also is one ``Shard(dim)`` over all their ranks.


def gathered_positions(rest: Sequence[Placement], run: Sequence[Placement]) -> tuple[int, ...]:
    """The axes over which a parameter is cut at rest, in one cut, and whole while it runs; () where there are none, where
    cuts differ, or where something else changes."""
    found = tuple(position for position, (one, other) in enumerate(zip(rest, run)) if one != other)
    cuts = {rest[position] for position in found}
    if len(cuts) != 1 or not all(isinstance(run[position], Replicate) for position in found):
        return ()
    cut = rest[found[0]]
    if isinstance(cut, RaggedShard):
        return found if found == ragged_positions(rest) else ()
    return found if type(cut) is Shard else ()


def ragged_positions(placements: Sequence[Placement | None]) -> tuple[int, ...]:
    """The axes with a ragged cut."""
    return tuple(position for position, placement in enumerate(placements) if isinstance(placement, RaggedShard))


def join_placements(
    placements: Sequence[Placement], sizes: Sequence[int], positions: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Placements, and sizes of axes, with those at ``positions`` as one behind the others; as they are where that is one."""
    if len(positions) <= 1:
        return tuple(placements), tuple(sizes)
    others = [position for position in range(len(sizes)) if position not in positions]
    joint = math.prod(sizes[position] for position in positions)
    return (
        (*(placements[position] for position in others), placements[positions[0]]),
        (*(sizes[position] for position in others), joint),
    )


@dataclass(frozen=True)
class GatheredUnit:
    """Parameters of one unit that are sharded over the same axes.

    Attributes:
        path: the module.
        names: full first names of the parameters, in the model's order.
        shard: the axes over which they are cut at rest, all in one cut, and gathered while the module computes; in the
            order of the mesh.
        replicate: axes along which the inputs of the model are cut and the parameters are not: replicas, whose gradients
            are summed with those of the ranks of ``shard``.
        entry: the plan's; None for a unit that was inferred.
        precision: the dtypes of the parameters by the innermost precision entry around them; None: their own.
    """

    path: str
    names: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    entry: UnitEntry | None
    precision: PrecisionEntry | None = None


def find_units(
    resolution: Resolution, index: ModelIndex, axes: MeshAxes, findings: Findings
) -> tuple[GatheredUnit, ...]:
    """The units of the parameters that rest sharded, in one cut over one axis or several, and run replicated there; mistakes
    become findings."""
    explicit = resolution.units
    inferred = [path for path in repeated_blocks(index) if explicit.keys().isdisjoint(enclosing(path))]
    paths = {**dict.fromkeys(("", *inferred)), **explicit}
    replicas = _input_axes(resolution)
    found: dict[tuple[str, tuple[str, ...], tuple[str, ...], PrecisionEntry | None], list[str]] = {}
    for name, planned in resolution.states.items():
        if not index.states[name].is_parameter:
            continue
        shard = gathered_axes(planned, axes)
        if not shard:
            _check_reachable(name, planned, index, axes, paths, findings)
            continue
        path = _unit_of(name, index, paths, findings)
        run = dict(zip(axes, planned.running(axes)))
        whole = (a for a in axes if a not in shard and isinstance(run[a], Replicate))
        replicate = tuple(a for a in whole if a in replicas and axes.size(a) > 1)
        precision = precision_of(index.reader(name)[0], resolution, index)
        found.setdefault((path, shard, replicate, precision), []).append(name)
    units = tuple(
        GatheredUnit(path, tuple(names), shard, replicate, paths[path], precision)
        for (path, shard, replicate, precision), names in found.items()
    )
    _check_entries(units, resolution, axes, findings)
    return units


def precision_of(path: str, resolution: Resolution, index: ModelIndex) -> PrecisionEntry | None:
    """The entry that gives the dtypes of what the module at ``path`` reads: that of the innermost module around it."""
    around = (index.module_names[path] for path in enclosing(path))
    return next((resolution.precisions[path] for path in around if path in resolution.precisions), None)


def gathered_axes(planned: PlannedState, axes: MeshAxes) -> tuple[str, ...]:
    """The axes over which a parameter is cut at rest and whole while it runs, if that is all that changes; else ()."""
    if planned.annotated or planned.grad or planned.grad_annotated:
        return ()
    positions = gathered_positions(planned.init.complete(axes), planned.running(axes))
    return tuple(axes.names[position] for position in positions)


def repeated_blocks(index: ModelIndex) -> Iterator[str]:
    """Outermost modules that a model repeats: the items of its lists, and of sequences with several of one class."""

    def visit(module: nn.Module, path: str) -> Iterator[str]:
        blocks = _blocks(module)
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            canonical = index.module_names[inner]
            if name in blocks and index.is_called(canonical):
                yield canonical
            else:
                yield from visit(child, inner)

    return visit(index.model, "")


def _blocks(container: nn.Module) -> set[str]:
    """Names of the children that are blocks."""
    children = list(container.named_children())
    if isinstance(container, nn.ModuleList):
        return {name for name, _ in children}
    if not isinstance(container, nn.Sequential | nn.ModuleDict):
        return set()
    kinds = [type(child) for _, child in children]
    composed = {
        type(child)
        for _, child in children
        if any(True for _ in child.children()) or not type(child).__module__.startswith("torch.nn.")
    }
    return {name for name, child in children if type(child) in composed and kinds.count(type(child)) > 1}


def _input_axes(resolution: Resolution) -> set[str]:
    """Axes over which an input of the model is cut."""
    return {
        axis
        for (path, side, _), planned in resolution.boundaries.items()
        if (path, side) == ("", "<in>")
        for role in (planned.dst, planned.src, planned.annotated)
        for axis, choice in role.items().items()
        if shard_dim(choice.placement) is not None
    }


def _unit_of(name: str, index: ModelIndex, paths: dict[str, UnitEntry | None], findings: Findings) -> str:
    """The innermost unit that holds all places of a parameter; a finding where the plan puts them into several."""
    state = index.states[name]
    chains = []
    for alias in state.names:
        around = (index.module_names[path] for path in enclosing(alias.rpartition(".")[0]))
        chains.append([path for path in around if path in paths])
    common = next(path for path in chains[0] if all(path in chain for chain in chains))
    for alias, (innermost, *_) in zip(state.names, chains):
        entry = paths[innermost]
        if innermost != common and entry is not None:
            others = ", ".join(f"{n} in {c[0] or 'the model itself'}" for n, c in zip(state.names, chains))
            findings.error(
                "tied-units",
                f"unit '{entry.path}': one weight has several names, {', '.join(state.names)} ({others}), in "
                f"different units: remove the unit around {alias}, so that {common or 'the model itself'} holds it, "
                "or name a module that contains all of them",
                entry.source,
            )
            break
    return common


def _check_reachable(
    name: str,
    planned: PlannedState,
    index: ModelIndex,
    axes: MeshAxes,
    paths: dict[str, UnitEntry | None],
    findings: Findings,
) -> None:
    rest, run = planned.init.complete(axes), planned.running(axes)
    if len(ragged_positions(rest)) > 1:
        _check_joint_cut(name, planned, index, axes, findings)
        return
    changes = [(axis, one, other) for axis, one, other in zip(axes, rest, run) if one != other]
    entry = next((e for path in enclosing(index.owner(name)[0]) if (e := paths.get(path)) is not None), None)
    for axis, one, other in changes:
        if isinstance(other, Replicate) and len(changes) == 1:
            continue  # its gradient has entries of its own, so that it is moved by itself
        if isinstance(one, RaggedShard):
            reason = "a ragged placement at rest can only be gathered before its module runs"
        elif entry is not None:
            reason = f"unit '{entry.path}' can only gather parameters, each of which has one kind of shard"
        else:
            continue
        choice = planned.running_at(axis)
        more = ", and its placements on other axes change, too" if len(changes) > 1 else ""
        findings.error(
            "unreachable",
            f"{{names}} is {placement_text(one)} on {axis} at rest and {placement_text(other)} on {axis} while it "
            f"runs{more}: {reason}; write {axis}: {{init: {placement_text(one)}, run: R}}, and change no other "
            f"axis{', or use the same placement on all axes that change' if more else ''}",
            choice.entry.source if choice is not None else None,
            shown_name(index.states[name]),
        )
        return


def _check_joint_cut(name: str, planned: PlannedState, index: ModelIndex, axes: MeshAxes, findings: Findings) -> None:
    """A parameter that rests ragged on several axes, and is not gathered over all of them."""
    rest, run = planned.init.complete(axes), planned.running(axes)
    ragged = [axes.names[position] for position in ragged_positions(rest)]
    cuts = {axis: placement for axis, placement in zip(axes, rest) if axis in ragged}
    one = placement_text(cuts[ragged[0]])
    wanted = ", ".join(f"{axis}: {{init: {one}, run: R}}" for axis in ragged)
    advice = f"write {wanted}, and change no other axis, or keep only one of them"
    others = [axis for axis, a, b in zip(axes, rest, run) if a != b and axis not in ragged]
    if len(set(cuts.values())) > 1:
        reason = "its placements differ, but it must have a single one over the ranks of all these axes together"
    elif not all(isinstance(placement, Replicate) for axis, placement in zip(axes, run) if axis in ragged):
        reason = (
            f"it runs {_listed({axis: run[axes.index(axis)] for axis in ragged})}, but a shard is gathered as a whole"
        )
    elif others:
        reason = f"its placement also changes on {', '.join(others)}, but a unit can only gather"
    else:
        reason = "it has entries for its gradient, which exclude it from units, and only a unit can gather it"
        advice = "remove those, or keep only one of the axes"
    choice = planned.running_at(ragged[-1])
    findings.error(
        "unreachable",
        f"{{names}} is {_listed(cuts)} at rest: {reason}; {advice}",
        choice.entry.source if choice is not None else None,
        shown_name(index.states[name]),
    )


def _listed(placements: Mapping[str, Placement]) -> str:
    return ", ".join(f"{placement_text(placement)} on {axis}" for axis, placement in placements.items())


def _check_entries(units: tuple[GatheredUnit, ...], resolution: Resolution, axes: MeshAxes, findings: Findings) -> None:
    held = {unit.path for unit in units}
    by_entry: dict[int, tuple[UnitEntry, list[str]]] = {}
    for path, entry in resolution.units.items():
        by_entry.setdefault(id(entry), (entry, []))[1].append(path)
    for entry, matched in by_entry.values():
        if not held.intersection(matched) and not findings.has_errors:  # it may follow from another mistake
            _empty(entry, matched, held, findings)
    for unit in units:
        if unit.entry is None:
            continue
        _check_reshard(unit, axes, findings)
        region = next((path for path in enclosing(unit.path) if path != unit.path and path in resolution.locals), None)
        if region is not None:
            local = resolution.locals[region]
            findings.error(
                "unit-conflict",
                f"unit '{unit.entry.path}' ({unit.path}) is inside the local region '{local.path}' ({local.source}), "
                "whose ranks may run different modules, but all ranks must gather a unit together; make "
                + (f"{region}, or a module that contains it, the unit" if region else "the model itself the unit"),
                unit.entry.source,
            )


def _empty(entry: UnitEntry, matched: list[str], held: set[str], findings: Findings) -> None:
    inner = sorted(path for path in held if any(around in matched for around in enclosing(path)))
    shown = name_list(matched)
    if inner:
        problem = (
            f"unit '{entry.path}' covers no sharded parameter: those in {shown} belong to the smaller units "
            f"{name_list(inner)}; remove one of the two"
        )
    else:
        problem = (
            f"unit '{entry.path}' covers no sharded parameter: nothing in {shown} is sharded at rest and replicated "
            "while it runs; add shard entries for its parameters, {axis: {init: Ragged, run: R}}, or remove the "
            "unit"
        )
    findings.error("empty-unit", problem, entry.source)


def _check_reshard(unit: GatheredUnit, axes: MeshAxes, findings: Findings) -> None:
    entry = unit.entry
    assert entry is not None
    keep, size = entry.reshard_after_forward, math.prod(map(axes.size, unit.shard))
    if keep is not None and not isinstance(keep, bool) and size % keep:
        source: Source | None = entry.source
        findings.error(
            "reshard",
            f"unit '{entry.path}': reshard_after_forward={keep} does not divide the {size} ranks of "
            f"{', '.join(unit.shard)}; use True, False, or a number of ranks that does",
            source,
        )


# The buffers in which a program's units are gathered: planned without a rank, with the functions that the engine uses.


@dataclass(frozen=True)
class UnitBucket:
    """Parameters of one unit, dtype and ``requires_grad``: one buffer, one all-gather, one reduce-scatter.

    Sizes are those of one rank. ``resting_bytes`` are always there, ``whole_bytes`` while the unit is gathered, and
    ``gradient_bytes`` while its gradients are not reduced; padding included.
    """

    path: str
    names: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    dtype: torch.dtype
    requires_grad: bool
    num_ranks: int
    num_replicas: int
    num_elements: int
    buffer_size: int
    layout: Layout
    backward_ranks: int
    """Among how many ranks parameters are gathered again for backward; 1: they are kept."""
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    is_offloaded: bool = False
    parts: tuple[tuple[int, ...], ...] = ()
    """Where the plan gives the cut, for each parameter the elements of each rank; ``layout`` is of one rank's piece."""

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when their layouts are."""
        return self.layout.digest

    @property
    def padding_elements(self) -> int:
        return self.buffer_size - self.num_elements

    @property
    def whole_bytes(self) -> int:
        return self.buffer_size * self.compute_dtype.itemsize

    @property
    def resting_bytes(self) -> int:
        """On the device."""
        return 0 if self.is_offloaded else self.buffer_size // self.num_ranks * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.buffer_size * self.reduce_dtype.itemsize if self.requires_grad else 0

    @property
    def collectives(self) -> tuple[tuple[str, str, str, int], ...]:
        """(phase, op, axes joined with ``,``, bytes that a rank exchanges with others) of each in a step."""
        whole, shard = self.whole_bytes, ",".join(self.shard)
        found = [("forward", "all_gather", shard, whole // self.num_ranks * (self.num_ranks - 1))]
        if self.backward_ranks > 1:
            again = whole // self.backward_ranks * (self.backward_ranks - 1)
            found.append(("backward", "all_gather", shard, again))
        if self.requires_grad:
            piece = self.gradient_bytes // self.num_ranks
            found.append(("backward", "reduce_scatter", shard, piece * (self.num_ranks - 1)))
            summed = 2 * piece * (self.num_replicas - 1) // self.num_replicas
            found.append(("backward", "all_reduce", ",".join(self.replicate), summed))
        return tuple(one for one in found if one[3])


def unit_buckets(program: Program, model: nn.Module) -> tuple[UnitBucket, ...]:
    """Every buffer of every unit, in the program's order. Reads names, shapes and dtypes; nothing is communicated."""
    index = ModelIndex(model)
    resting = _resting(program, index)
    units = [(i.path, i.op) for i in program if isinstance(i.op, Unit)]
    return tuple(bucket for path, unit in units for bucket in _buckets(path, unit, index, program.axes, resting))


def _buckets(
    path: str, unit: Unit, index: ModelIndex, axes: MeshAxes, resting: dict[str, tuple[Placement, ...]]
) -> Iterator[UnitBucket]:
    positions = [axes.index(axis) for axis in unit.shard]
    ranks = math.prod(map(axes.size, unit.shard))
    kinds: dict[tuple[torch.dtype, bool, bool], list[str]] = {}
    for name in unit.names:
        first = index.state_names[f"{path}.{name}" if path else name]
        owner, attribute = index.owner(first)
        tensor = getattr(index.modules[owner], attribute)
        rest = resting[first][positions[0]]
        is_planned = isinstance(rest, RaggedShard) and rest.local_units is None
        kinds.setdefault((tensor.dtype, tensor.requires_grad, is_planned), []).append(first)
    keep = unit.reshard_after_forward if unit.reshard_after_forward is not None else bool(path)
    backward = (ranks if keep else 1) if isinstance(keep, bool) else keep
    policy = unit.mp_policy
    for (dtype, requires_grad, _), names in kinds.items():
        narrow = policy.param_dtype if policy is not None and dtype.is_floating_point else None
        compute = narrow or dtype
        reduced = compute if policy is None else reduce_dtype_of(policy, dtype, compute)
        dtypes = frozenset((dtype, compute, reduced))
        places = []
        for name in names:
            at_rest = resting[name]
            run = [Replicate() if axis in positions else placement for axis, placement in enumerate(at_rest)]
            places.append(_place(index.states[name].shape or (), at_rest[positions[0]], run, axes.sizes, ranks))
        parts = [max(part) if part is not None else None for _, part, _ in places]
        if parts[0] is None:  # the planner's choice
            layout = _layout(
                tuple(numel for numel, _, _ in places), tuple(block for _, _, block in places), ranks, dtypes
            )
            size = layout.buffer_size
        else:
            layout = _layout(tuple(part or 0 for part in parts), (1,) * len(parts), 1, dtypes)
            size = layout.buffer_size * ranks
        held = sum(numel for numel, _, _ in places)
        yield UnitBucket(
            path,
            tuple(names),
            unit.shard,
            unit.replicate,
            dtype,
            requires_grad,
            ranks,
            math.prod(axes.size(axis) for axis in unit.replicate),
            held,
            size,
            layout,
            backward,
            compute,
            reduced,
            unit.offload_pinned is not None,
            tuple(part for _, part, _ in places if part is not None),
        )


def _resting(program: Program, index: ModelIndex) -> dict[str, tuple[Placement, ...]]:
    found: dict[str, tuple[Placement, ...]] = {}
    for i in program:
        if isinstance(i.op, Place):
            name = index.state_names[f"{i.path}.{i.target}" if i.path else i.target]
            found[name] = tuple(Replicate() if p is None else p for p in i.op.placements)
    return found


def _place(
    shape: tuple[int, ...], rest: Placement, run: list[Placement], sizes: tuple[int, ...], ranks: int
) -> tuple[int, tuple[int, ...] | None, int]:
    """(elements, those of each rank's part where the cut is given, elements that stay together)."""
    local = local_region(shape, run, sizes, (0,) * len(sizes)).local_shape
    inner = [dim for p in run if (dim := shard_dim(p)) is not None and dim > 0]
    if type(rest) is Shard:
        size, others = local[rest.dim], math.prod(n for dim, n in enumerate(local) if dim != rest.dim)
        chunk = -(-size // ranks)
        return math.prod(local), tuple(max(0, min(chunk, size - r * chunk)) * others for r in range(ranks)), 1
    assert isinstance(rest, RaggedShard)
    if rest.local_units is None:
        return math.prod(local), None, rest.granule(local, inner)
    runs = (rest.run(local, local, ranks, rank, inner) for rank in range(ranks))
    return math.prod(local), tuple(end - begin for begin, end in runs), 1


@functools.lru_cache(maxsize=1024)  # layers repeat
def _layout(numels: tuple[int, ...], blocks: tuple[int, ...], ranks: int, dtypes: frozenset[torch.dtype]) -> Layout:
    names = [str(number) for number in range(len(numels))]
    return TensorGroup.plan(
        {name: (numel,) for name, numel in zip(names, numels)},
        ranks,
        dtypes=set(dtypes),
        blocks=dict(zip(names, blocks)),
    ).layout


# Predicts the buckets in which gradients of parameters are reduced, with the functions that the runtime uses.


@dataclass(frozen=True)
class PartialGradient:
    """A gradient that every rank along ``axes`` has a part of: ``num_bytes`` on each rank.

    ``scatter`` is the one of the axes on which the parameter is sharded at rest, if any.
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: int
    dtype: torch.dtype
    scatter: str | None = None


@dataclass(frozen=True)
class PredictedBucket:
    """Gradients that are reduced together.

    Attributes:
        names: of the parameters, in the order in which their gradients get ready.
        axes: their union is one group.
        num_bytes: of the buffer.
        cost: of the reduction, by the ring model.
        per_axis_bytes: what a rank would send if each axis were reduced by itself.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    num_bytes: int
    cost: ReductionCost
    per_axis_bytes: int
    scatter: str | None = None

    @property
    def collectives(self) -> tuple[tuple[str, str, int], ...]:
        """(op, axes joined with ``,``, bytes) of each."""
        axes = ",".join(self.axes)
        if not self.cost.scatters:
            return (("all_reduce", axes, self.cost.num_bytes),)
        rest = self.cost.rest_bytes
        scattered = ("reduce_scatter", str(self.scatter), self.cost.num_bytes - rest)
        others = ",".join(axis for axis in self.axes if axis != self.scatter)
        return (scattered, ("all_reduce", others, rest)) if others else (scattered,)


def predict_buckets(gradients: Sequence[PartialGradient], axes: MeshAxes) -> tuple[PredictedBucket, ...]:
    """The buckets of ``gradients``, given in the order in which they get ready."""
    link = link_of("cpu")
    num_ranks = [math.prod(axes.size(axis) for axis in gradient.axes) for gradient in gradients]
    limits = bucket_limits(DEFAULT_BUCKET_BYTES, max(num_ranks, default=1), link)
    found = []
    for indices in plan_buckets([((g.axes, g.dtype, g.scatter), g.num_bytes) for g in gradients], limits):
        first, num_bytes = gradients[indices[0]], sum(gradients[index].num_bytes for index in indices)
        num_pieces = axes.size(first.scatter) if first.scatter is not None else 1
        cost = reduction_cost(num_bytes, num_ranks[indices[0]], num_pieces, link)
        unfused = per_axis_bytes(num_bytes, [axes.size(axis) for axis in first.axes])
        names = tuple(gradients[index].name for index in indices)
        found.append(PredictedBucket(names, first.axes, num_bytes, cost, unfused, first.scatter))
    return tuple(found)
