"""Layouts of a bucket: which part of each parameter a rank has at rest, and where it is in a piece of the buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import DBuffer, TensorGroup
from vescale.fsdp._axes import DataParallelAxes
from vescale.fsdp._parameter import ManagedParameter
from vescale.placements import Region

__all__ = ["CallerLayout", "Layout", "PlannedLayout", "equal_pieces"]


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

    def slot(self, index: int) -> tuple[int, tuple[int, ...]]:
        """(offset, shape) of a parameter's part in this rank's piece."""
        offset, numel, _ = self._runs[index]
        return offset, (numel,)

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


class CallerLayout:
    """What the caller of ``fully_shard`` asks for: chunks of one dim (``Shard(dim)``), or runs of given lengths
    (``RaggedShard`` with units).

    Such parts of several tensors cannot be the pieces of one buffer in which every tensor is contiguous. So ``exchanged``
    is another buffer than ``whole``: rank r's piece holds its parts one after the other, each padded to the largest rank's.
    After an all-gather and before a reduce-scatter, :meth:`copy` leads from one to the other.
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
        self.has_gaps = any(len(set(self._numels(index))) > 1 for index in range(len(parameters)))
        """Whether some rank's parts are shorter than the room for them."""

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

    def slot(self, index: int) -> tuple[int, tuple[int, ...]]:
        """See :class:`PlannedLayout`, for this and the next three."""
        return self._piece.offsets[index], self._shape(index, self.rank)

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

    def copy(self, exchanged: DBuffer, whole: DBuffer, *, gathered: bool) -> None:
        """Copy all ranks' parts of all parameters: to ``whole`` if ``exchanged`` was gathered, else to ``exchanged``."""
        rows = exchanged.local.view(self.num_ranks, -1)
        with torch.no_grad():
            for index in range(len(self.parameters)):
                for piece, part in self._pairs(index, rows, whole.views[index]):
                    if gathered:
                        part.copy_(piece)
                    else:
                        piece.copy_(part)

    def _pairs(
        self, index: int, rows: torch.Tensor, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same elements in the pieces of the exchange (``rows``) and in the whole tensor; one pair for chunks of equal
        size, else one for each rank."""
        dim, offset = self.parameters[index].dim, self._piece.offsets[index]
        if dim is not None and whole.shape[dim] % self.num_ranks == 0:
            shape = self._shape(index, 0)
            chunks = rows.narrow(1, offset, math.prod(shape)).unflatten(1, shape)
            yield chunks, whole.unflatten(dim, (self.num_ranks, shape[dim])).movedim(dim, 0)
            return
        for rank, row in enumerate(rows):
            shape = self._shape(index, rank)
            yield row.narrow(0, offset, math.prod(shape)).view(shape), self._part(index, rank, whole)


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
