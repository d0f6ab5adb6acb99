"""``BufferGather``: the all-gather of plain parameters, into a buffer that the unsharded ones are views of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from vescale.buffer import Allocation, DBuffer, PendingBuffer
from vescale.comm import Pending, all_gather_into
from vescale.fsdp._layout import CallerLayout
from vescale.fsdp._shards import BufferShards
from vescale.gradients import DataParallelAxes, OrderedUnit


class BufferGather:
    """Gathers the shards into ``whole``, in ``dtype``. With a :class:`CallerLayout` they pass through another buffer.

    Args:
        memory: what is allocated before each gather, and freed when the group is resharded.

    Attributes:
        num_bytes: of the buffer that the all-gather fills.
    """

    def __init__(self, shards: BufferShards, dtype: torch.dtype, device: torch.device, memory: Allocation) -> None:
        self._layout, self._shards, self._axes = shards.layout, shards, shards.layout.axes
        layout, axes = self._layout, self._axes
        self.whole = DBuffer(layout.whole, axes.mesh, axes.gathered(), dtype=dtype, allocation=memory)
        self.num_bytes = layout.exchanged.layout.buffer_size * dtype.itemsize
        self._kept: tuple[torch.Tensor, dist.ProcessGroup] | None = None
        self._exchange: DBuffer | None = None
        if isinstance(layout, CallerLayout):
            self._exchange = DBuffer(layout.exchanged, axes.mesh, axes.gathered(), dtype=dtype, device=device)
        else:
            self._own_piece = self.whole.piece((axes.shard,))
            self._gathers_as_is = dtype == shards.dtype and shards.buffer.device == device

    def start(self, unit: OrderedUnit, requester: str, custom: Any = None) -> PendingBuffer:
        """Gather from where the shards are; only a cast, or another device, takes a copy. ``custom`` replaces the
        collective over all ranks; see :meth:`FSDPModule.set_custom_all_gather`.

        This, or waiting for it, raises OrderMismatchError if another rank gathers a unit of another size.
        """
        shards, layout, whole = self._shards.buffer, self._layout, self.whole
        if self._kept is not None:
            piece, neighbours = self._kept
            unit.begins_gather_of_kept(piece.nbytes)
            return PendingBuffer(whole, all_gather_into(whole.local, piece, neighbours, requester=requester))
        unit.begins_gather(self.num_bytes // self._axes.shard_size)
        if self._exchange is None:
            source = shards if self._gathers_as_is else self._own_piece.copy_(shards)
            gathered = all_gather(source, whole, self._axes, requester, custom)

            def check() -> None:
                gathered.wait()
                unit.check_gathered(whole.local)

            return PendingBuffer(whole, Pending(whole.local, (), check))
        assert isinstance(layout, CallerLayout)
        exchange = self._exchange.fresh()
        pending = all_gather(exchange.piece((self._axes.shard,)).copy_(shards), exchange, self._axes, requester, custom)

        def copy_out() -> None:
            pending.wait()
            unit.check_gathered(exchange.local)
            layout.copy_from_exchange(exchange, whole)

        return PendingBuffer(whole, Pending(whole.local, (), copy_out))

    def unsharded(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter, as a view of the gathered buffer, which is allocated."""
        return self.whole.alias(self._layout.whole.layout.offsets[index], shape)

    def keep_piece(self, neighbours: dist.ProcessGroup) -> None:
        """Copy this rank's piece out of the gathered buffer; the next gather is from the pieces of ``neighbours``. No block
        is cut, because the finer cut over all ranks respects blocks already."""
        size = self.whole.numel // neighbours.size()
        begin = neighbours.rank() * size
        with torch.no_grad():
            self._kept = self.whole.local[begin : begin + size].clone(), neighbours

    def drop_piece(self) -> None:
        self._kept = None

    @property
    def kept_bytes(self) -> int:
        return self._kept[0].nbytes if self._kept is not None else 0


def all_gather(
    piece: DBuffer, whole: DBuffer, axes: DataParallelAxes, requester: str, custom: Any = None
) -> PendingBuffer:
    """Gather pieces along the shard axis into ``whole``, which is allocated."""
    if custom is None:
        return piece.all_gather((axes.shard,), out=whole, requester=requester)
    group = axes.shard_group
    work = custom(output_tensor=whole.local, input_tensor=piece.local, group=group, async_op=True)
    return PendingBuffer(whole, Pending(whole.local, [work]))
