"""``GivenBucket``: parameters whose cut at rest is given; gathering and reducing them costs copies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.comm import Pending
from vescale.fsdp._bucket import Bucket
from vescale.placements import RaggedShard, Region

__all__ = ["GivenBucket", "pieces_of"]


def pieces_of(size: int, num_ranks: int, dtypes: Iterable[torch.dtype], alignment_bytes: int) -> TensorGroup:
    """All ranks' pieces of an exchange, ``size`` elements each, as tensors that are never cut: collectives then see an
    ordinary sharded buffer."""
    return TensorGroup.plan(
        {str(rank): (size,) for rank in range(num_ranks)},
        num_ranks,
        dtypes=dtypes,
        blocks={str(rank): max(1, size) for rank in range(num_ranks)},
        alignment_bytes=alignment_bytes,
    )


class GivenBucket(Bucket):
    """A bucket whose sharded parameters are chunks of one dim each (``Shard(dim)``), or runs of given lengths
    (``RaggedShard`` with units).

    Such parts of several tensors cannot be the pieces of one buffer in which every tensor is contiguous. So there are two
    layouts: ``exchange``, in which rank r's piece is its parts one after the other (each padded to the largest rank's), for
    the collectives and the shards; and ``group``, whole tensors, for the unsharded parameters and gradients. A copy leads
    from one to the other after each all-gather and before each reduce-scatter.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "like": None})

    def _plan(self) -> TensorGroup:
        num_ranks = self.axes.shard_size
        self._parts = [[p.given_part(rank, num_ranks) for rank in range(num_ranks)] for p in self.parameters]
        dtypes = {self.dtype, self.compute_dtype, self.reduce_dtype}
        one_rank = TensorGroup.plan(
            {p.name: (max(self._numel(i, r) for r in range(num_ranks)),) for i, p in enumerate(self.parameters)},
            1,
            dtypes=dtypes,
            alignment_bytes=self.alignment_bytes,
        )
        size = one_rank.layout.shard_size
        self.exchange = pieces_of(size, num_ranks, dtypes, self.alignment_bytes)
        self._one_rank = one_rank
        return TensorGroup.plan(
            {p.name: p.shape for p in self.parameters}, num_ranks, dtypes=dtypes, alignment_bytes=self.alignment_bytes
        )

    def _new_shards(self, memory: Allocation) -> DBuffer:
        return DBuffer(self.exchange, self.axes.mesh, self.axes.sharded(), dtype=self.dtype, allocation=memory)

    # One rank's part of a parameter

    def _shape(self, index: int, rank: int) -> tuple[int, ...]:
        parameter, (_, length) = self.parameters[index], self._parts[index][rank]
        if parameter.dim is None:
            return (length,)
        return (*parameter.shape[: parameter.dim], length, *parameter.shape[parameter.dim + 1 :])

    def _numel(self, index: int, rank: int) -> int:
        return math.prod(self._shape(index, rank))

    def _of_whole(self, index: int, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of a whole (local) parameter, a view of a contiguous one."""
        dim, (begin, length) = self.parameters[index].dim, self._parts[index][rank]
        return whole.reshape(-1)[begin : begin + length] if dim is None else whole.narrow(dim, begin, length)

    @cached_property
    def _rank(self) -> int:
        return self.axes.mesh.get_local_rank(self.axes.shard)

    def shard(self, index: int) -> torch.Tensor:
        offset = self._one_rank.layout.offsets[index]
        return self.shards.alias(offset, self._shape(index, self._rank), own_storage=True)

    def part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return self._in_piece(flat, index, self._rank)

    def _in_piece(self, piece: torch.Tensor, index: int, rank: int) -> torch.Tensor:
        """The part in a rank's flat piece of an exchange buffer."""
        shape = self._shape(index, rank)
        return piece.narrow(0, self._one_rank.layout.offsets[index], math.prod(shape)).view(shape)

    def placement(self, index: int) -> Placement:
        return self.parameters[index].given_placement()

    def _own(self, index: int, whole_local: torch.Tensor) -> torch.Tensor:
        return self._of_whole(index, self._rank, whole_local)

    def _own_region(self, index: int) -> Region:
        parameter, (begin, length) = self.parameters[index], self._parts[index][self._rank]
        shape, dim = parameter.shape, parameter.dim
        if dim is None:
            return Region(shape, tuple(((0, n),) for n in shape), (begin, begin + length))
        return Region(shape, tuple(((begin, begin + length),) if d == dim else ((0, n),) for d, n in enumerate(shape)))

    # Between the two layouts

    def _chunks(self, buffer: DBuffer, index: int) -> torch.Tensor | None:
        """An evenly cut parameter's chunks on all ranks in an exchange buffer, as (ranks, *chunk); None for others."""
        parameter, num_ranks = self.parameters[index], self.axes.shard_size
        if parameter.dim is None or parameter.shape[parameter.dim] % num_ranks:
            return None
        rows = buffer.local.view(num_ranks, -1)
        offset, shape = self._one_rank.layout.offsets[index], self._shape(index, 0)
        return rows.narrow(1, offset, math.prod(shape)).unflatten(1, shape)

    def _assemble(self, buffer: DBuffer) -> None:
        """Copy all ranks' parts to the whole tensors."""
        with torch.no_grad():
            rows = buffer.local.view(self.axes.shard_size, -1)
            for index, parameter in enumerate(self.parameters):
                target, chunks = self.whole.views[index], self._chunks(buffer, index)
                if chunks is not None and parameter.dim is not None:
                    dim = parameter.dim
                    target.unflatten(dim, (chunks.shape[0], chunks.shape[1 + dim])).copy_(chunks.movedim(0, dim))
                    continue
                for rank, row in enumerate(rows):
                    self._of_whole(index, rank, target).copy_(self._in_piece(row, index, rank))

    def _take_apart(self, buffer: DBuffer) -> None:
        """Copy the whole gradients to all ranks' parts."""
        with torch.no_grad():
            rows = buffer.local.view(self.axes.shard_size, -1)
            for index, parameter in enumerate(self.parameters):
                source, chunks = self.unreduced.buffer.views[index], self._chunks(buffer, index)
                if chunks is not None and parameter.dim is not None:
                    dim = parameter.dim
                    chunks.copy_(source.unflatten(dim, (chunks.shape[0], chunks.shape[1 + dim])).movedim(dim, 0))
                    continue
                for rank, row in enumerate(rows):
                    self._in_piece(row, index, rank).copy_(self._of_whole(index, rank, source))

    def gather(self, asker: str, custom: Any = None) -> PendingBuffer:
        axes = self.axes
        wide = DBuffer(
            self.exchange, axes.mesh, axes.gathered(), dtype=self.compute_dtype, device=self.whole.device
        ).allocate()
        piece = wide.piece((axes.shard,)).copy_(self.shards)
        if custom is None:
            pending = piece.all_gather((axes.shard,), out=wide, asker=asker)
        else:
            group = axes.mesh.get_group(axes.shard)
            work = custom(output_tensor=wide.local, input_tensor=piece.local, group=group, async_op=True)
            pending = PendingBuffer(wide, Pending(wide.local, [work]))

        def assemble() -> None:
            pending.wait()
            self._assemble(wide)

        return PendingBuffer(self.whole, Pending(self.whole.local, (), assemble))

    def reduce_scatter(
        self, op: str, group: dist.ProcessGroup | None, custom: Any, asker: str, *, at_once: bool = False
    ) -> PendingBuffer:
        axes, device = self.axes, self.unreduced.buffer.device
        wide = DBuffer(self.exchange, axes.mesh, axes.unreduced(op), dtype=self.reduce_dtype, device=device).allocate()
        if self._has_gaps:
            wide.zero_()
        self._take_apart(wide)
        placements = axes.buffer_placements(RaggedShard(), Partial(op))
        piece = DBuffer(self.exchange, axes.mesh, placements, dtype=self.reduce_dtype, device=device).allocate()
        return self._reduce_into(piece, wide, op, group, custom, asker, at_once)

    @cached_property
    def _has_gaps(self) -> bool:
        """Whether some rank's parts are shorter than the places for them."""
        ranks = range(self.axes.shard_size)
        return any(len({self._numel(index, rank) for rank in ranks}) > 1 for index in range(len(self.parameters)))
