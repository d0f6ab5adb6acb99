"""Which communication makes a gradient complete: a pure function of how it arrives and how its parameter is placed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import axis_group
from vescale.errors import GradientError
from vescale.gradients._data_parallel_axes import AxisSet, MeshUnion, unite
from vescale.placements import Piece, RaggedShard, local_region, plan_exchange, ragged_axis, shard_dim

Op = Literal["avg", "sum"]
_REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_ADDITIVE = {"sum", "avg"}


@dataclass(frozen=True)
class Arrival:
    """Placements and dtype of a gradient as autograd computes it. ``placements`` is None for a plain tensor."""

    placements: tuple[Placement, ...] | None
    dtype: torch.dtype


@dataclass(frozen=True)
class Destination:
    """Where a complete gradient belongs.

    Attributes:
        shape: the global shape.
        mesh: None for a plain tensor.
        target: placements of the complete gradient; () for a plain tensor.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    target: tuple[Placement, ...]


@dataclass(frozen=True)
class Policy:
    """Settings that hold for all gradients of one reducer; see :class:`GradientReducer`."""

    mesh: DeviceMesh
    op: Op | None
    reduce_dtype: torch.dtype | None


@dataclass(frozen=True)
class Stage:
    """One collective: ``op`` over the union of some axes."""

    axes: AxisSet
    op: str


@dataclass(frozen=True)
class Reduction:
    """What gradients that are reduced together must have in common.

    Attributes:
        stages: consecutive collectives; a single one if the axes span a group that can be named.
        divisor: the sum is divided by it.
        dtype, reduce_dtype: dtypes of the gradient and of the buffer.
        scatter: the axis (of the first stage's mesh) along which the result may be scattered, or None.
    """

    stages: tuple[Stage, ...]
    divisor: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    scatter: int | None

    @property
    def num_pieces(self) -> int:
        return 1 if self.scatter is None else self.stages[0].axes.mesh.size(self.scatter)

    def text(self) -> str:
        """Axes, op, dtype and destination; for reports, and to compare ranks."""
        stages = ", then ".join(
            f"{stage.op} over {'x'.join(f'{n}={s}' for n, s in zip(stage.axes.names, stage.axes.sizes))}"
            for stage in self.stages
        )
        average = f", divided by {self.divisor}" if self.divisor > 1 else ""
        where = "replicated"
        if self.scatter is not None:
            names = self.stages[0].axes.mesh.mesh_dim_names
            where = f"scattered over {names[self.scatter] if names else self.scatter}"
        cast = f" in {self.reduce_dtype}" if self.reduce_dtype != self.dtype else ""
        return f"{stages}{average}, {self.dtype}{cast}, {where}"


@dataclass(frozen=True)
class Contribution:
    """The steps from an arriving gradient to a complete one, as placements.

    ===========  ==========================================================================================
    ``staged``   after the axes that are not pending were brought to the target; None for a plain tensor
    ``reduced``  after ``reduction``, which is done in a bucket together with other gradients; None if
                 nothing is pending
    ``target``   after a local cut of what was not scattered
    ===========  ==========================================================================================

    Attributes:
        local_shape: shape of this rank's contribution, and of the result unless it is scattered.
        result_shape: that of the result.
        pieces: the part of each rank along the scattered axis, in group rank order; None if nothing is scattered.
    """

    staged: tuple[Placement, ...] | None
    reduction: Reduction | None
    reduced: tuple[Placement, ...]
    local_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    pieces: tuple[Piece, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)


def contribution(arrival: Arrival, destination: Destination, policy: Policy) -> Contribution:
    """The steps for a gradient that arrives as ``arrival``.

    Partial axes are reduced in a bucket if they have one op, or are all sums and averages; others are reduced one by one.

    Raises ValueError if the reducer's mesh and the parameter's mesh share ranks without being parts of one mesh, and if a
    complex gradient would be reduced in a real dtype.
    """
    wide = policy.reduce_dtype or arrival.dtype
    if arrival.dtype.is_complex and not wide.is_complex:
        raise GradientError(
            f"a gradient of {arrival.dtype} would lose its imaginary part in reduce_dtype={wide}; use a complex one, "
            "or reduce it with a separate reducer"
        )
    if destination.mesh is None:
        axes = _nontrivial(policy.mesh, range(policy.mesh.ndim))
        averaged = axes if policy.op in (None, "avg") else ()
        divisor = math.prod(policy.mesh.size(axis) for axis in averaged)
        every = (Stage(AxisSet(policy.mesh, axes), "sum"),)
        reduction = Reduction(every, divisor, arrival.dtype, wide, None) if axes else None
        return Contribution(None, reduction, (), destination.shape, destination.shape)
    assert arrival.placements is not None
    mesh, target = destination.mesh, destination.target
    pending = tuple(
        axis
        for axis, (found, wanted) in enumerate(zip(arrival.placements, target))
        if type(found) is Partial and found.reduce_op in _REDUCE_OPS and not wanted.is_partial()
    )
    ops = {found.reduce_op for axis in pending if isinstance(found := arrival.placements[axis], Partial)}
    if len(ops) > 1 and not ops <= _ADDITIVE:
        pending = ()
    staged = tuple(
        found if axis in pending or wanted.is_partial() else wanted
        for axis, (found, wanted) in enumerate(zip(arrival.placements, target))
    )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local_shape = local_region(destination.shape, staged, tuple(mesh.shape), coordinate).local_shape
    reduced = tuple(Replicate() if axis in pending else p for axis, p in enumerate(staged))
    stages, divisor = _stages(arrival.placements, _nontrivial(mesh, pending), mesh, policy)
    if not stages:
        return Contribution(staged, None, reduced, local_shape, local_shape)
    scattered = _scattered_axis(staged, target, pending, stages, mesh)
    if scattered is None:
        reduction = Reduction(stages, divisor, arrival.dtype, wide, None)
        return Contribution(staged, reduction, reduced, local_shape, local_shape)
    reduced = tuple(target[axis] if axis == scattered else p for axis, p in enumerate(reduced))
    group = axis_group(mesh, (scattered,))
    held = tuple(target[axis] if axis == scattered else p for axis, p in enumerate(staged))
    plan = plan_exchange(destination.shape, tuple(mesh.shape), staged, held, coordinate, group.coordinates)
    reduction = Reduction(stages, divisor, arrival.dtype, wide, scattered)
    result_shape = local_region(destination.shape, reduced, tuple(mesh.shape), coordinate).local_shape
    return Contribution(staged, reduction, reduced, local_shape, result_shape, plan.sends)


def _nontrivial(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


def _stages(
    placements: Sequence[Placement], pending: tuple[int, ...], mesh: DeviceMesh, policy: Policy
) -> tuple[tuple[Stage, ...], int]:
    """The collectives over the pending axes of the tensor's mesh and over the axes of the reducer's mesh that the tensor's
    mesh lacks, and the divisor."""
    union = unite(mesh, policy.mesh)
    ops = {p.reduce_op for axis in pending if isinstance(p := placements[axis], Partial)}
    adds = ops <= _ADDITIVE
    op = "sum" if adds else ops.pop()
    outside = _outside(mesh, policy.mesh, union)
    divisor = 1
    for axis in pending if adds else ():
        own = placements[axis]
        asked = policy.op if union is not None and _shared(union, axis) else None
        if asked == "avg" or (asked is None and own.is_partial("avg")):
            divisor *= mesh.size(axis)
    if policy.op in (None, "avg"):
        divisor *= math.prod(policy.mesh.size(axis) for axis in outside)
    if not pending and not outside:
        return (), 1
    if union is not None and (adds or not outside or not pending):
        own_axes = {joint for axis in pending for joint in union.first[axis]}
        other = {joint for axis in outside for joint in union.second[axis]}
        return (Stage(AxisSet(union.mesh, tuple(sorted(own_axes | other))), op if pending else "sum"),), divisor
    # No mesh is known that both are parts of, or the two are reduced with different ops: one collective each.
    first = (Stage(AxisSet(mesh, pending), op),) if pending else ()
    second = (Stage(AxisSet(policy.mesh, outside), "sum"),) if outside else ()
    return first + second, divisor


def _shared(union: MeshUnion, axis: int) -> bool:
    """Whether an axis of the tensor's mesh is also an axis of the reducer's mesh."""
    return bool(set(union.first[axis]) & {joint for axes in union.second for joint in axes})


def _outside(mesh: DeviceMesh, other: DeviceMesh, union: MeshUnion | None) -> tuple[int, ...]:
    """The axes of the reducer's mesh ``other`` that ``mesh`` does not span: every rank along them contributes."""
    axes = _nontrivial(other, range(other.ndim))
    if union is not None:
        own = {joint for axes in union.first for joint in axes}
        return tuple(axis for axis in axes if not own & set(union.second[axis]))
    common = set(mesh.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())
    if len(common) > 1:
        raise GradientError(
            f"a parameter is on {mesh}, but its gradient would be reduced over {other}: they share ranks "
            f"{sorted(common)[:8]}, but are not slices of one mesh; obtain both by slicing one DeviceMesh"
        )
    return axes


def _scattered_axis(
    staged: Sequence[Placement],
    target: Sequence[Placement],
    pending: Sequence[int],
    stages: Sequence[Stage],
    mesh: DeviceMesh,
) -> int | None:
    """The only pending axis on which the result is sharded, if a reduce-scatter can produce it.

    A rank's part of the result must be a part of its contribution. A ragged placement applies last, so this holds if no
    other placement changes; a Shard-like placement must not be followed by an axis that cuts the same tensor dim.
    """
    wanted = [axis for axis in pending if not target[axis].is_replicate() and mesh.size(axis) > 1]
    if len(wanted) != 1 or len(stages) != 1 or stages[0].axes.mesh != mesh or stages[0].op != "sum":
        return None
    (axis,) = wanted
    others = [p for a, p in enumerate(staged) if a != axis]
    if ragged_axis(others) is not None:
        return None
    if isinstance(target[axis], RaggedShard):
        after = [p for a, p in enumerate(target) if a != axis]
        fits = all(s == t or (s.is_partial() and t.is_replicate()) for s, t in zip(others, after))
    else:
        fits = all(shard_dim(later) != shard_dim(target[axis]) for later in staged[axis + 1 :])
    coordinates = axis_group(mesh, (axis,)).coordinates
    return axis if fits and list(coordinates) == sorted(coordinates) else None


# Averages as divided sums: before the reduction where that is exact, else after it.


def copy_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """Copy ``source``, multiplied by ``scale``, to ``target``, which may be the same memory."""
    if target.dtype == source.dtype and target.data_ptr() != source.data_ptr() and scale != 1:
        torch.mul(source, scale, out=target)
        return
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def divide_(numbers: torch.Tensor, divisor: float) -> None:
    """In place. Complex numbers are divided as pairs of real ones, because complex division turns -0.0 into 0.0."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    if _is_power_of_two(divisor):  # as exact as a division, and faster
        numbers.mul_(1 / divisor)
    else:
        numbers.div_(divisor)


def is_exact_before_sum(reduction: Reduction) -> bool:
    """Whether contributions may be divided before the sum: by a power of two, in a dtype with a wide range of exponents."""
    return reduction.divisor > 1 and _is_power_of_two(reduction.divisor) and reduction.reduce_dtype != torch.float16


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5
