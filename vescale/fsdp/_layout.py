"""Layouts of a bucket: which part of each parameter a rank has at rest, and where it is in a piece of the buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import DBuffer, TensorGroup
from vescale.fsdp._parameter import ManagedParameter
from vescale.gradients import DataParallelAxes
from vescale.placements import Region


class PlannedLayout:
    """The planner's choice: pieces of one buffer in which every tensor is contiguous. Collectives need no copies.

    Attributes:
        whole: the buffer of whole tensors, which the unsharded parameters are views of.
        exchanged: the buffer that collectives move, whose pieces are the shards.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        axes: DataParallelAxes,
        dtypes: set[torch.dtype],
        alignment_bytes: int,
    ) -> None:
        self.parameters, self.axes, self.alignment_bytes = parameters, axes, alignment_bytes
        self.whole = self.exchanged = TensorGroup.plan(
            {p.name: p.place for p in parameters},
            axes.shard_size,
            dtypes=dtypes,
            blocks={p.name: p.block for p in parameters},
            alignment_bytes=alignment_bytes,
        )

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """For each parameter (offset in the piece, elements there, first element of the flattened parameter)."""
        geometry = DBuffer(self.whole, self.axes.mesh, self.axes.sharded(), dtype=torch.uint8, device="meta")
        held = {part.tensor: part for part in geometry.slices}
        found = []
        for index, parameter in enumerate(self.parameters):
            part = held.get(index)
            if part is None:
                found.append((0, 0, 0))
                continue
            numel = min(part.end, math.prod(parameter.shape)) - part.begin  # the place may be larger than the tensor
            found.append((part.local_offset, max(0, numel), part.begin))
        return found

    @cached_property
    def slots(self) -> list[tuple[int, int, tuple[int, ...] | None]]:
        """(offset, elements, shape unless it is flat) of each parameter's part in this rank's piece."""
        return [(offset, numel, None) for offset, numel, _ in self._runs]

    def own(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole (local) parameter."""
        _, numel, begin = self._runs[index]
        return whole.reshape(-1)[begin : begin + numel]

    def own_region(self, index: int) -> Region:
        """The indices of the same part."""
        _, numel, begin = self._runs[index]
        shape = self.parameters[index].shape
        return Region(shape, tuple(((0, size),) for size in shape), (begin, begin + numel))

    def placement(self, index: int) -> Placement:
        """The placement of a parameter's sharded form along the shard axis."""
        return self.exchanged.placement(index, self.axes.shard_size, self.parameters[index].split_factor)

    def to_exchange(self, whole: DBuffer) -> DBuffer:
        """The buffer to reduce of whole gradients."""
        return whole


class CallerLayout:
    """What the caller of ``fully_shard`` specifies: chunks of one dim (``Shard(dim)``), or runs of given lengths
    (``RaggedShard`` with units).

    Such parts of several tensors cannot be the pieces of one buffer in which every tensor is contiguous. So ``exchanged``
    is another buffer than ``whole``: rank r's piece holds its parts one after the other, each padded to the largest rank's.
    After an all-gather and before a reduce-scatter a copy leads from one to the other.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        axes: DataParallelAxes,
        dtypes: set[torch.dtype],
        alignment_bytes: int,
    ) -> None:
        self.parameters, self.axes, self.alignment_bytes = parameters, axes, alignment_bytes
        self.num_ranks = axes.shard_size
        self._parts = [[p.given_part(rank, self.num_ranks) for rank in range(self.num_ranks)] for p in parameters]
        largest = {p.name: (max(self._numels(index)),) for index, p in enumerate(parameters)}
        self._piece = TensorGroup.plan(largest, 1, dtypes=dtypes, alignment_bytes=alignment_bytes).layout
        self.exchanged = equal_pieces(self._piece.shard_size, self.num_ranks, dtypes, alignment_bytes)
        shapes = {p.name: p.shape for p in parameters}
        self.whole = TensorGroup.plan(shapes, self.num_ranks, dtypes=dtypes, alignment_bytes=alignment_bytes)
        self._has_gaps = any(len(set(self._numels(index))) > 1 for index in range(len(parameters)))
        """Whether some rank's parts are shorter than the room for them."""
        self._geometries: dict[tuple[torch.dtype, tuple[Placement | None, ...]], DBuffer] = {}

    def _shape(self, index: int, rank: int) -> tuple[int, ...]:
        parameter, (_, length) = self.parameters[index], self._parts[index][rank]
        if parameter.dim is None:
            return (length,)
        return (*parameter.shape[: parameter.dim], length, *parameter.shape[parameter.dim + 1 :])

    def _numels(self, index: int) -> list[int]:
        """Elements of a parameter on each rank."""
        return [math.prod(self._shape(index, rank)) for rank in range(self.num_ranks)]

    @cached_property
    def rank(self) -> int:
        return self.axes.mesh.get_local_rank(self.axes.shard)

    @cached_property
    def slots(self) -> list[tuple[int, int, tuple[int, ...] | None]]:
        """See :class:`PlannedLayout`, for this and the next three."""
        shapes = [self._shape(index, self.rank) for index in range(len(self.parameters))]
        return [(offset, math.prod(shape), shape) for offset, shape in zip(self._piece.offsets, shapes, strict=True)]

    def own(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        return self._part(index, self.rank, whole)

    def own_region(self, index: int) -> Region:
        parameter, (begin, length) = self.parameters[index], self._parts[index][self.rank]
        shape, dim = parameter.shape, parameter.dim
        if dim is None:
            return Region(shape, tuple(((0, n),) for n in shape), (begin, begin + length))
        return Region(shape, tuple(((begin, begin + length),) if d == dim else ((0, n),) for d, n in enumerate(shape)))

    def placement(self, index: int) -> Placement:
        return self.parameters[index].given_placement()

    def _part(self, index: int, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """A rank's part of a whole (local) parameter, a view of a contiguous one."""
        dim, (begin, length) = self.parameters[index].dim, self._parts[index][rank]
        return whole.reshape(-1)[begin : begin + length] if dim is None else whole.narrow(dim, begin, length)

    def copy_from_exchange(self, exchanged: DBuffer, whole: DBuffer) -> None:
        """Copy all ranks' parts of all parameters to the whole tensors."""
        with torch.no_grad():
            for piece, part in self._pairs(exchanged, whole):
                part.copy_(piece)

    def to_exchange(self, whole: DBuffer) -> DBuffer:
        """A copy of the whole tensors in all ranks' pieces."""
        geometry = self._geometries.get((whole.dtype, whole.placements))
        if geometry is None:
            geometry = DBuffer(self.exchanged, whole.mesh, whole.placements, dtype=whole.dtype, device=whole.device)
            self._geometries[whole.dtype, whole.placements] = geometry
        exchanged = geometry.fresh()
        if self._has_gaps:
            exchanged.zero_()
        with torch.no_grad():
            for piece, part in self._pairs(exchanged, whole):
                piece.copy_(part)
        return exchanged

    def _pairs(self, exchanged: DBuffer, whole: DBuffer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same elements in the exchange and in the whole tensors; one pair for chunks of equal size, else one for each
        rank."""
        rows = exchanged.local.view(self.num_ranks, -1)
        for index, tensor in enumerate(whole.views):
            dim, offset = self.parameters[index].dim, self._piece.offsets[index]
            if dim is not None and tensor.shape[dim] % self.num_ranks == 0:
                shape = self._shape(index, 0)
                chunks = rows.narrow(1, offset, math.prod(shape)).unflatten(1, shape)
                yield chunks, tensor.unflatten(dim, (self.num_ranks, shape[dim])).movedim(dim, 0)
                continue
            for rank, row in enumerate(rows):
                shape = self._shape(index, rank)
                yield row.narrow(0, offset, math.prod(shape)).view(shape), self._part(index, rank, tensor)


Layout = PlannedLayout | CallerLayout


def equal_pieces(size: int, num_ranks: int, dtypes: Iterable[torch.dtype], alignment_bytes: int) -> TensorGroup:
    """A buffer of one piece of ``size`` elements for each rank."""
    return TensorGroup.plan(
        {str(rank): (size,) for rank in range(num_ranks)},
        num_ranks,
        dtypes=dtypes,
        blocks={str(rank): max(1, size) for rank in range(num_ranks)},
        alignment_bytes=alignment_bytes,
    )
