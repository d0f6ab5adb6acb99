"""``DimBucket``: parameters that must be ``Shard(dim)`` at rest; gathering and reducing them costs copies."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.comm import Pending
from vescale.compat import StridedShard
from vescale.fsdp._bucket import Bucket
from vescale.placements import RaggedShard, Region

__all__ = ["DimBucket"]


class DimBucket(Bucket):
    """A bucket whose sharded parameters are chunks of one dim each.

    Chunks of several tensors cannot be the pieces of one buffer in which every tensor is contiguous. So there are two
    layouts: ``exchange``, in which rank r's piece is its chunks one after the other (padded to the first rank's), for the
    collectives and the shards; and ``group``, whole tensors, for the unsharded parameters and gradients. A copy leads from
    one to the other after each all-gather and before each reduce-scatter.

    Raises NotImplementedError for a dim above 0 that the ranks do not divide.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "like": None})

    def _plan(self) -> TensorGroup:
        self._chunks = [self._chunk_shape(p.name, p.shape, p.dim or 0) for p in self.parameters]
        num_ranks = self.axes.shard_size
        dtypes = {self.dtype, self.compute_dtype, self.reduce_dtype}
        one_rank = TensorGroup.plan(
            {p.name: shape for p, shape in zip(self.parameters, self._chunks, strict=True)},
            1,
            dtypes=dtypes,
            alignment_bytes=self.alignment_bytes,
        )
        size = one_rank.layout.shard_size
        # All ranks' pieces, each as one tensor that is never cut: the collectives then see an ordinary sharded buffer.
        self.exchange = TensorGroup.plan(
            {str(rank): (size,) for rank in range(num_ranks)},
            num_ranks,
            dtypes=dtypes,
            blocks={str(rank): max(1, size) for rank in range(num_ranks)},
            alignment_bytes=self.alignment_bytes,
        )
        self._one_rank = one_rank
        return TensorGroup.plan(
            {p.name: p.shape for p in self.parameters}, num_ranks, dtypes=dtypes, alignment_bytes=self.alignment_bytes
        )

    def _chunk_shape(self, name: str, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        size, num_ranks = shape[dim], self.axes.shard_size
        if dim > 0 and size % num_ranks:
            raise NotImplementedError(
                f"parameter {name!r} of shape {shape}: Shard({dim}) cuts {size} into {num_ranks} uneven chunks; choose "
                "another dim, or leave it to the planner (None), which cuts anywhere"
            )
        return (*shape[:dim], -(-size // num_ranks), *shape[dim + 1 :])

    def _new_shards(self, memory: Allocation) -> DBuffer:
        return DBuffer(self.exchange, self.axes.mesh, self.axes.sharded(), dtype=self.dtype, allocation=memory)

    @cached_property
    def _lengths(self) -> list[tuple[int, int]]:
        """For each parameter (first index, number of indices) of its dim on this rank."""
        rank = self.axes.mesh.get_local_rank(self.axes.shard)
        found = []
        for parameter, chunk in zip(self.parameters, self._chunks, strict=True):
            dim = parameter.dim or 0
            begin = min(rank * chunk[dim], parameter.shape[dim])
            found.append((begin, min(chunk[dim], parameter.shape[dim] - begin)))
        return found

    def _local_shape(self, index: int) -> tuple[int, ...]:
        dim = self.parameters[index].dim or 0
        chunk = self._chunks[index]
        return (*chunk[:dim], self._lengths[index][1], *chunk[dim + 1 :])

    def shard(self, index: int) -> torch.Tensor:
        return self.shards.alias(self._one_rank.layout.offsets[index], self._local_shape(index))

    def part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        shape = self._local_shape(index)
        return flat.narrow(0, self._one_rank.layout.offsets[index], math.prod(shape)).view(shape)

    def placement(self, index: int) -> Placement:
        parameter = self.parameters[index]
        dim, factor = parameter.dim or 0, parameter.split_factor
        return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)

    def _own(self, index: int, whole_local: torch.Tensor) -> torch.Tensor:
        return whole_local.narrow(self.parameters[index].dim or 0, *self._lengths[index])

    def _own_region(self, index: int) -> Region:
        shape, dim = self.parameters[index].shape, self.parameters[index].dim or 0
        begin, length = self._lengths[index]
        return Region(shape, tuple(((begin, begin + length),) if d == dim else ((0, n),) for d, n in enumerate(shape)))

    # Between the two layouts

    def _exchanged(self, buffer: DBuffer, index: int) -> torch.Tensor:
        """One parameter's chunks on all ranks in an exchange buffer, as (ranks, *chunk)."""
        chunk = self._chunks[index]
        rows = buffer.local.view(self.axes.shard_size, -1)
        return rows.narrow(1, self._one_rank.layout.offsets[index], math.prod(chunk)).unflatten(1, chunk or (1,))

    def _assemble(self, buffer: DBuffer) -> None:
        """Copy all ranks' chunks to the whole tensors."""
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                dim, chunks = parameter.dim or 0, self._exchanged(buffer, index)
                target = self.whole.views[index]
                if parameter.shape[dim] == chunks.shape[0] * chunks.shape[1 + dim]:
                    target.unflatten(dim, (chunks.shape[0], chunks.shape[1 + dim])).copy_(chunks.movedim(0, dim))
                else:  # only dim 0 may be uneven
                    target.copy_(chunks.flatten(0, 1)[: parameter.shape[0]])

    def _take_apart(self, buffer: DBuffer) -> None:
        """Copy the whole gradients to all ranks' chunks."""
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                dim, chunks = parameter.dim or 0, self._exchanged(buffer, index)
                source = self.gradients.views[index]
                if parameter.shape[dim] == chunks.shape[0] * chunks.shape[1 + dim]:
                    chunks.copy_(source.unflatten(dim, (chunks.shape[0], chunks.shape[1 + dim])).movedim(dim, 0))
                else:
                    size = chunks.shape[1]
                    for rank in range(chunks.shape[0]):
                        rows = source[rank * size : (rank + 1) * size]
                        chunks[rank, : len(rows)].copy_(rows)
                        chunks[rank, len(rows) :].zero_()

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

    def reduce_scatter(self, op: str, group: dist.ProcessGroup | None, custom: Any, asker: str) -> PendingBuffer:
        axes, device = self.axes, self.gradients.device
        wide = DBuffer(self.exchange, axes.mesh, axes.unreduced(op), dtype=self.reduce_dtype, device=device).allocate()
        self._take_apart(wide)
        placements = axes.buffer_placements(RaggedShard(), Partial(op))
        piece = DBuffer(self.exchange, axes.mesh, placements, dtype=self.reduce_dtype, device=device).allocate()
        return self._reduce_into(piece, wide, op, group, custom, asker)
