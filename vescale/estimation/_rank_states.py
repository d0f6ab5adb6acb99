"""Bytes at rest of every rank of a program: parameters, their gradients, and elements that an optimizer has states for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.estimation._bucket_gradients import bucket_bytes
from vescale.estimation._memory_timeline import MemoryTimeline, label_of
from vescale.estimation._rehearsal import Rehearsal
from vescale.ir import Place, Program, Repeats, UnitBucket, Wrap, unit_buckets
from vescale.placements import local_region, shard_dim

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankStates:
    """Arrays over the coordinates of the mesh.

    Attributes:
        parameters: bytes of parameters and buffers at rest, padding included.
        gradients: bytes of complete gradients, padding included.
        elements: of the parameters that an optimizer gets, without padding.
        padding: of these bytes, padding of parameters.
        in_units: names of the parameters in buffers of units.
    """

    parameters: np.ndarray
    gradients: np.ndarray
    elements: np.ndarray
    padding: int
    in_units: frozenset[str] = frozenset()


def rank_states(program: Program, model: nn.Module) -> RankStates:
    """Reads names, shapes, placements and the planner's layouts; equal layers are looked at once."""
    sizes = program.axes.sizes
    resting = _resting(program)
    buckets = unit_buckets(program, model)
    in_units = frozenset(name for bucket in buckets for name in bucket.names)
    parameters = np.zeros(sizes, dtype=np.int64)
    gradients = np.zeros(sizes, dtype=np.int64)
    elements = np.zeros(sizes, dtype=np.int64)
    padding = 0
    for bucket, times in Counter(_Layout.of(bucket) for bucket in buckets).items():
        parameters += bucket.resting_bytes * times
        padding += bucket.padding_bytes * times
        if bucket.requires_grad:
            gradients += bucket.resting_bytes * times
            elements += _on_mesh(bucket.numels_of_ranks(), bucket.shard, program) * times
    kinds = Counter(
        (tuple(tensor.shape), tensor.element_size(), is_parameter and tensor.requires_grad, resting[name])
        for name, tensor, is_parameter in _states(model, resting)
        if name not in in_units
    )
    for (shape, itemsize, trains, placements), times in kinds.items():
        numels = _numels(shape, placements, sizes)
        parameters += numels * itemsize * times
        if trains:
            gradients += numels * itemsize * times
            elements += numels * times
    return RankStates(parameters, gradients, elements, padding, in_units)


@dataclass(frozen=True)
class _Layout:
    """What equal buckets of different units have in common."""

    resting_bytes: int
    padding_bytes: int
    requires_grad: bool
    shard: tuple[str, ...]
    num_ranks: int
    shard_size: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, bucket: UnitBucket) -> _Layout:
        layout = bucket.layout
        return cls(
            bucket.resting_bytes,
            bucket.padding_elements * bucket.dtype.itemsize // bucket.num_ranks,
            bucket.requires_grad,
            bucket.shard,
            bucket.num_ranks,
            layout.shard_size,
            layout.offsets,
            layout.numels,
            bucket.parts,
        )

    def numels_of_ranks(self) -> np.ndarray:
        """Elements, without padding, of each rank of the unit."""
        if self.parts:
            return np.array(self.parts, dtype=np.int64).sum(axis=0)
        first = np.arange(self.num_ranks, dtype=np.int64) * self.shard_size
        found = np.zeros(self.num_ranks, dtype=np.int64)
        for offset, numel in zip(self.offsets, self.numels):
            found += np.clip(np.minimum(first + self.shard_size, offset + numel) - np.maximum(first, offset), 0, None)
        return found


def _on_mesh(numels: np.ndarray, axes: tuple[str, ...], program: Program) -> np.ndarray:
    """By rank of joined axes, as an array that broadcasts over the mesh."""
    shape = [size if axis in axes else 1 for axis, size in zip(program.axes.names, program.axes.sizes)]
    return np.broadcast_to(numels.reshape(shape), program.axes.sizes)


def _resting(program: Program) -> dict[str, tuple[Placement, ...]]:
    found = {}
    for i in program:
        if isinstance(i.op, Place):
            name = f"{i.path}.{i.target}" if i.path else i.target
            found[name] = tuple(Replicate() if p is None else p for p in i.op.placements)
    return found


def _states(model: nn.Module, resting: dict[str, tuple[Placement, ...]]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, parameter in model.named_parameters():
        if name in resting:
            yield name, parameter, True
    for name, buffer in model.named_buffers():
        if name in resting:
            yield name, buffer, False


def _numels(shape: Shape, placements: tuple[Placement, ...], sizes: Shape) -> np.ndarray:
    """Elements of each rank's part."""
    cuts = [n for n, p in enumerate(placements) if not isinstance(p, Replicate) and sizes[n] > 1]
    if all(type(placements[n]).__name__ == "Shard" for n in cuts):
        by_dim: Counter[int] = Counter()
        for n in cuts:
            by_dim[shard_dim(placements[n]) or 0] += 0
        pieces = {dim: math.prod(sizes[n] for n in cuts if shard_dim(placements[n]) == dim) for dim in by_dim}
        if all(shape[dim] % count == 0 for dim, count in pieces.items()):
            return np.full(sizes, math.prod(shape) // math.prod(pieces.values()), dtype=np.int64)
    small = tuple(size if n in cuts else 1 for n, size in enumerate(sizes))
    found = np.zeros(small, dtype=np.int64)
    for coordinate in np.ndindex(*small):
        found[coordinate] = math.prod(local_region(shape, placements, sizes, coordinate).local_shape)
    return np.broadcast_to(found, sizes)


# Memory of every rank, from those that were run and what every rank has at rest.


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks that need the same, in bytes.

    Attributes:
        ranks: these ranks; ``coordinates``: of the first of them, by axis.
        peak_bytes: the most at one instant of a step in steady state; ``peak_at``: that instant.
        first_step_bytes: the peak of the first step.
        categories: what there is at the peak; ``activations`` by module. ``maximum``: of each category at any instant.
        timeline: the step as moments: ``at``, ``bytes`` and categories.
        saved_bytes: of activations when the forward ends.
    """

    ranks: tuple[int, ...]
    coordinates: dict[str, int]
    peak_bytes: int
    peak_at: str
    first_step_bytes: int
    categories: dict[str, Any]
    maximum: dict[str, int]
    timeline: tuple[dict[str, Any], ...]
    saved_bytes: int


@dataclass(frozen=True)
class SeenRank:
    """A rank that was run."""

    rank: int
    rehearsal: Rehearsal
    timeline: MemoryTimeline


def uneven_axes(program: Program, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Axes whose ranks do not get equal parts of the batch."""
    found: dict[str, None] = {}
    for i in program:
        if i.path == "" and isinstance(i.op, Wrap):
            given = [batch.get(str(i.index))] if i.index is not None else list(batch.values())
            for axis, placement in zip(program.axes.names, i.op.placements):
                dim = shard_dim(placement) if placement is not None else None
                sizes = [
                    x.shape[dim] for x in given if dim is not None and isinstance(x, torch.Tensor) and x.ndim > dim
                ]
                if any(size % program.axes.size(axis) for size in sizes):
                    found[axis] = None
    return tuple(found)


def memory_of_ranks(
    program: Program, seen: list[SeenRank], uneven: tuple[str, ...], repeats: tuple[Repeats, ...], states: RankStates
) -> tuple[RankMemory, ...]:
    """The ranks that were run, and the others with their own parameters, gradients and optimizer states."""
    sizes = program.axes.sizes
    chosen = np.zeros(sizes, dtype=np.int64)
    if len(seen) > 1:
        chosen[tuple(size - 1 if axis in uneven else slice(None) for axis, size in zip(program.axes.names, sizes))] = 1
    names = ("parameters", "gradients", "optimizer")
    changes = []
    for one in seen:
        own = tuple(map(int, np.unravel_index(one.rank, sizes)))
        optimizer = _optimizer_bytes(one.rehearsal, repeats, states, own)
        apart = [*one.rehearsal.in_buckets, *one.rehearsal.beside_units]
        gradients = states.gradients + bucket_bytes(apart, repeats, states.in_units, program.axes)
        more = np.stack([a - a[own] for a in (states.parameters, gradients, optimizer)], axis=-1)
        if one.timeline.host_share:  # what is offloaded differs in the host's memory
            more = (more * (1 - one.timeline.host_share)).astype(np.int64)
        changes.append(more)
    change = changes[0] if len(seen) == 1 else np.where(chosen[..., None] == 1, changes[1], changes[0])
    stacked = np.concatenate([change, chosen[..., None]], axis=-1).reshape(-1, len(names) + 1)
    rows, first, inverse = np.unique(stacked, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    found = []
    for row in sorted(range(len(rows)), key=lambda n: first[n]):
        one = seen[int(rows[row][-1])]
        last = one.rehearsal.num_steps - 1
        own_change = {name: int(value) for name, value in zip(names, rows[row])}
        ranks = tuple(map(int, groups[row]))
        found.append(_rank_memory(program, ranks, one.timeline, one.timeline.peak_of(last), last, own_change))
    return tuple(found)


def _rank_memory(
    program: Program,
    ranks: tuple[int, ...],
    timeline: MemoryTimeline,
    peak: int,
    step: int,
    change: dict[str, int],
) -> RankMemory:
    def changed(categories: dict[str, int]) -> dict[str, int]:
        """Gradients that are not there do not change."""
        return {
            name: max(0, size + change.get(name, 0)) if size or name != "gradients" else 0
            for name, size in categories.items()
        }

    categories: dict[str, Any] = changed(timeline.at(peak))
    total = sum(categories.values())
    moments = tuple(
        {"at": m.at, "bytes": sum(changed(m.categories).values()), **changed(m.categories)}
        for m in timeline.moments(step)
    )
    first = sum(changed(timeline.at(timeline.peak_of(0))).values())
    categories["activations"] = timeline.activations(peak)
    coordinates = {name: int(c) for name, c in zip(program.axes.names, np.unravel_index(ranks[0], program.axes.sizes))}
    at = label_of(timeline.instants[peak])
    saved = timeline.at(timeline.end_of_forward(step))["activations"]
    return RankMemory(ranks, coordinates, total, at, first, categories, changed(timeline.largest(step)), moments, saved)


def _optimizer_bytes(
    rehearsal: Rehearsal, repeats: tuple[Repeats, ...], states: RankStates, own: tuple[int, ...]
) -> np.ndarray:
    """Of every rank: states that have as many elements as their parameter grow with it, others are alike."""
    growing = fixed = 0
    for state in rehearsal.states:
        times = next((r.count for r in repeats if r.holds(state.module)), 1)
        if state.numel == state.parameter_numel:
            growing += state.num_bytes * times
        else:
            fixed += state.num_bytes * times
    elements = states.elements
    if not elements[own]:
        return np.full_like(elements, fixed + growing)
    return np.asarray(elements * growing // elements[own] + fixed, dtype=np.int64)
