"""Bytes at rest of every rank of a program: parameters, their gradients, and elements that an optimizer has states for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.ir import Place, Program, UnitBucket, unit_buckets
from vescale.placements import local_region, shard_dim

__all__ = ["RankStates", "rank_states"]

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
