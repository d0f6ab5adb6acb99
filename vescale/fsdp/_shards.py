"""Where the local tensors of sharded parameters are: slices of one buffer, or tensor subclasses with memory of their own."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, DBuffer
from vescale.compat import keep_memory, local_of, own_part, plain_parts, set_local
from vescale.errors import FullyShardError
from vescale.fsdp._extensions import copied, is_extended
from vescale.fsdp._layout import CallerLayout, Layout
from vescale.rng import is_deferred, materialize_part


class BufferShards:
    """Local tensors that are slices of ``buffer``, this rank's piece.

    Args:
        layout: of the parameters, which are all of ``dtype``.
    """

    buffer: DBuffer

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype

    def allocate(self, device: torch.device, *, pin_memory: bool = False) -> None:
        self.buffer = _buffer(self, device, pin_memory).allocate()

    def local(self, index: int) -> torch.Tensor:
        """A parameter's local tensor."""
        offset, numel, shape = self.layout.slots[index]
        return self.buffer.alias(offset, shape or (numel,), own_storage=True)

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """The local tensor, filled from a whole (local) or deferred one; of a deferred one only this part is computed."""
        local = self.local(index)
        if is_deferred(whole):
            local.copy_(materialize_part(whole, self.layout.own_region(index)).view_as(local))
        elif not local.is_meta:
            local.copy_(self.layout.own(index, whole.detach()))
        return local

    def adopt(self, index: int) -> None:
        """Copy the registered parameter, whose memory is elsewhere, to its slice of the buffer. It stays the same object
        unless it is placed otherwise; then it is redistributed, on all ranks."""
        parameter = self.layout.parameters[index]
        found, cut = parameter.sharded, self.layout.placement(index)
        spec = parameter.sharded_spec(cut, self.dtype)
        if not isinstance(found, DTensor):  # a whole parameter, the same on every rank
            parameter.make_sharded(self.cut(index, found), cut)
            return
        local, source = self.local(index), parameter.local_as(spec)
        if not local.is_meta:
            local.copy_(source)
        if tuple(found.placements) == tuple(spec.placements):
            set_local(found, local)
            keep_memory(found)
        else:
            parameter.make_sharded(local, cut)

    def holds(self, index: int) -> bool:
        """Whether the registered parameter's local tensor is :meth:`local`."""
        sharded, expected = self.layout.parameters[index].sharded, self.local(index)
        local = own_part(sharded)
        return (
            local.dtype == expected.dtype
            and local.device == expected.device
            and (local.is_meta or local.numel() == 0 or local.data_ptr() == expected.data_ptr())
        )

    @property
    def num_bytes(self) -> int:
        """Of this rank's parts, padding included."""
        return self.buffer.num_bytes

    @property
    def padding_elements(self) -> int:
        """Of all ranks' parts together."""
        return self.buffer.group.layout.buffer_size - sum(self.layout.whole.layout.numels)


class SubclassShards:
    """Local tensors of tensor subclasses, made by the subclass's own ``new_zeros`` and ``copy_``; each has memory of its
    own. ``buffer`` has no memory, and only specifies the device and whether memory is pinned."""

    buffer: DBuffer

    def __init__(self, layout: CallerLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype

    def allocate(self, device: torch.device, *, pin_memory: bool = False) -> None:
        self.buffer = _buffer(self, device, pin_memory)

    def local(self, index: int) -> torch.Tensor:
        sharded = self.layout.parameters[index].sharded
        assert isinstance(sharded, DTensor)
        return local_of(sharded)

    def cut(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of a whole (local) tensor."""
        chunks = torch.chunk(whole, self.layout.num_ranks)  # as FSDP2 does it: a subclass may have no other op for it
        if self.layout.rank < len(chunks):
            return self._at_home(copied(chunks[self.layout.rank]))
        return self._at_home(chunks[0].new_zeros((0, *whole.shape[1:])))

    def adopt(self, index: int) -> None:
        """Take the registered parameter as it is: on another device, of another dtype, or whole, which is cut."""
        parameter = self.layout.parameters[index]
        found, cut = parameter.sharded, self.layout.placement(index)
        if tuple(found.shape) != parameter.global_shape:
            raise FullyShardError(
                f"parameter {parameter.name!r} of shape {parameter.global_shape} was replaced by one of shape "
                f"{tuple(found.shape)}; use one of the same shape"
            )
        if not isinstance(found, DTensor):
            parameter.make_sharded(self.cut(index, found), cut)
            return
        spec = parameter.sharded_spec(cut, self.dtype)
        local = self._at_home(parameter.local_as(spec))
        if tuple(found.placements) != tuple(spec.placements):
            parameter.make_sharded(local, cut)
        elif local is not local_of(found):
            set_local(found, local)
            keep_memory(found)

    def holds(self, index: int) -> bool:
        """Whether the registered parameter is a shard of the right kind, on the right device."""
        parameter = self.layout.parameters[index]
        sharded, spec = parameter.sharded, parameter.sharded_spec(self.layout.placement(index), self.dtype)
        if not isinstance(sharded, DTensor) or tuple(sharded.placements) != tuple(spec.placements):
            return False
        local = local_of(sharded)
        return is_extended(local) and local.dtype == self.dtype and self._is_at_home(local)

    def _is_at_home(self, local: torch.Tensor) -> bool:
        if local.is_meta or local.device != self.buffer.device:
            return local.device == self.buffer.device
        return local.is_pinned() if self.buffer.is_pinned else True

    def _at_home(self, local: torch.Tensor) -> torch.Tensor:
        """``local`` on the device, and in pinned memory, where it belongs there."""
        if local.device != self.buffer.device:
            local = local.to(self.buffer.device)
        return local if self._is_at_home(local) else local.pin_memory()

    @property
    def num_bytes(self) -> int:
        return sum(
            part.nbytes for index in range(len(self.layout.parameters)) for part in plain_parts(self.local(index))
        )

    @property
    def padding_elements(self) -> int:
        return 0


Shards = BufferShards | SubclassShards


def _buffer(shards: Shards, device: torch.device, pin_memory: bool) -> DBuffer:
    """This rank's piece, without memory."""
    layout, memory = shards.layout, Allocation(device, pin_memory=pin_memory)
    return DBuffer(layout.exchanged, layout.axes.mesh, layout.axes.sharded(), dtype=shards.dtype, allocation=memory)
