"""``Bucket``: the parameters of a group that have one dtype and one ``requires_grad``, in planned buffers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.comm import Pending
from vescale.compat import (
    DTensorSpec,
    local_of,
    make_dtensor,
    make_spec,
    run_post_accumulate_hooks,
    set_local,
    spec_of,
)
from vescale.fsdp._axes import DataParallelAxes
from vescale.fsdp._extensions import refuse_hooks
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._phase import GradientPlace
from vescale.fsdp._unreduced import UnreducedGradients
from vescale.placements import RaggedShard, Region, redistribute
from vescale.rng import is_deferred, materialize_part

__all__ = ["GRADIENT_PLACE", "Bucket"]

GRADIENT_PLACE = "_vescale_gradient_place"
"""Attribute of unsharded parameters: (:class:`UnreducedGradients`, index), for ops that write gradients to their place."""


class Bucket:
    """Buffers of one kind of parameters, all over one :class:`TensorGroup`, so that their offsets are equal: that of
    ``like``, when the same parameters have been converted to another dtype.

    =============  ==================  ===========================================  ======================================
    buffer         dtype               holds                                        allocated
    =============  ==================  ===========================================  ======================================
    ``shards``     the parameters'     this rank's piece; local tensors of the      always (on the host when offloaded)
                                       sharded DTensors are slices of it
    ``whole``      ``param_dtype``     all parameters; the unsharded parameters     while the group is unsharded
                                       are views of it
    ``unreduced``  ``reduce_dtype``    unreduced gradients, one view a parameter    until reduced; the memory of ``whole``,
                                                                                    or its own: :class:`GradientPlace`
    (new each      the parameters'     this rank's piece of reduced gradients;      as long as ``.grad`` refers to it
    time)                              ``.grad`` of the sharded DTensors
    =============  ==================  ===========================================  ======================================
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        locals_: Sequence[torch.Tensor],
        axes: DataParallelAxes,
        *,
        mp_policy: MixedPrecisionPolicy,
        alignment_bytes: int,
        like: Bucket | None = None,
    ) -> None:
        param_dtype = mp_policy.param_dtype
        self.mp_policy = mp_policy
        self.parameters = list(parameters)
        self.axes = axes
        self.dtype = locals_[0].dtype
        self.requires_grad = any(p.requires_grad for p in parameters)
        self.compute_dtype = param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype
        self.reduce_dtype = mp_policy.reduce_dtype or self.compute_dtype
        self.alignment_bytes = alignment_bytes
        self.group: TensorGroup = like.group if like is not None else self._plan()
        self.device = locals_[0].device
        self.shards = self._new_shards(Allocation(self.device))
        self.whole: DBuffer
        self.unreduced = UnreducedGradients(self.parameters)

    # At rest

    def _plan(self) -> TensorGroup:
        return TensorGroup.plan(
            {p.name: p.place for p in self.parameters},
            self.axes.shard_size,
            dtypes={self.dtype, self.compute_dtype, self.reduce_dtype},
            blocks={p.name: p.block for p in self.parameters},
            alignment_bytes=self.alignment_bytes,
        )

    def _new_shards(self, memory: Allocation) -> DBuffer:
        return DBuffer(self.group, self.axes.mesh, self.axes.sharded(), dtype=self.dtype, allocation=memory)

    @cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        """For each parameter (offset in the shards, elements there, first element of the flattened parameter)."""
        held = {part.tensor: part for part in self.shards.slices}
        found = []
        for index, parameter in enumerate(self.parameters):
            part = held.get(index)
            if part is None:
                found.append((0, 0, 0))
                continue
            numel = min(part.end, math.prod(parameter.shape)) - part.begin  # the place may be larger than the tensor
            found.append((part.local_offset, max(0, numel), part.begin))
        return found

    def allocate_shards(self, device: torch.device, *, pin_memory: bool = False) -> None:
        self.shards = self._new_shards(Allocation(device, pin_memory=pin_memory))
        self.shards.allocate()

    def shard(self, index: int) -> torch.Tensor:
        """The slice of the shards that is one parameter's local tensor."""
        offset, numel, _ = self._runs[index]
        return self.shards.alias(offset, (numel,), own_storage=True)

    def part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's part of any flat piece that lies as the shards do."""
        offset, numel, _ = self._runs[index]
        return flat.narrow(0, offset, numel)

    def placement(self, index: int) -> Placement:
        """How one parameter's sharded form is cut along the shard axis."""
        return self.shards.placement(index, self.parameters[index].split_factor)

    def _own(self, index: int, whole_local: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole (local) parameter."""
        _, numel, begin = self._runs[index]
        return whole_local.reshape(-1)[begin : begin + numel]

    def _own_region(self, index: int) -> Region:
        """The same part, by its place in the parameter."""
        _, numel, begin = self._runs[index]
        shape = self.parameters[index].shape
        return Region(shape, tuple(((0, size),) for size in shape), (begin, begin + numel))

    def cut(self, whole_locals: Sequence[torch.Tensor]) -> None:
        """Take this rank's part of each whole (local) or deferred tensor, and register the sharded forms."""
        with torch.no_grad():
            for index, (parameter, tensor) in enumerate(zip(self.parameters, whole_locals, strict=True)):
                local = self.shard(index)
                if is_deferred(tensor):  # only this part of it is ever computed
                    local.copy_(materialize_part(tensor, self._own_region(index)).view_as(local))
                elif not local.is_meta:
                    local.copy_(self._own(index, tensor.detach()))
                parameter.make_sharded(local, self.placement(index))

    def copy(self, parameters: Sequence[ManagedParameter]) -> Bucket:
        """A bucket of the same values in memory of its own, for copies of the parameters; not registered."""
        twin = copy.copy(self)
        twin.parameters = list(parameters)
        twin.unreduced = UnreducedGradients(twin.parameters)
        memory = Allocation(self.shards.device, pin_memory=self.shards.is_pinned)
        twin.shards = twin._new_shards(memory).allocate()
        twin.shards.local.copy_(self.shards.local)
        for index, (parameter, original) in enumerate(zip(twin.parameters, self.parameters, strict=True)):
            data = make_dtensor(twin.shard(index), parameter.sharded_spec(twin.placement(index), twin.dtype))
            parameter.sharded = nn.Parameter(data, requires_grad=original.sharded.requires_grad)
        return twin

    def adopt(self) -> None:
        """Make the registered parameters, whose memory lies elsewhere, slices of the shards. They stay the same objects
        unless they are placed otherwise; then they are redistributed, on all ranks."""
        for index, parameter in enumerate(self.parameters):
            with torch.no_grad():
                found: torch.Tensor = parameter.sharded
                local, cut = self.shard(index), self.placement(index)
                spec = parameter.sharded_spec(cut, self.dtype)
                if not isinstance(found, DTensor):  # a whole parameter, the same on every rank
                    source = self._own(index, found.detach())
                else:
                    source = parameter.local_as(spec)
                if not local.is_meta:
                    local.copy_(source)
            if isinstance(found, DTensor) and tuple(found.placements) == tuple(spec.placements):
                set_local(found, local)
            else:
                parameter.make_sharded(local, cut)

    def holds(self, index: int) -> bool:
        """Whether a registered parameter lies where :meth:`shard` says."""
        sharded, place = self.parameters[index].sharded, self.shard(index)
        local = local_of(sharded) if isinstance(sharded, DTensor) else sharded
        return (
            local.dtype == place.dtype
            and local.device == place.device
            and (local.is_meta or local.numel() == 0 or local.data_ptr() == place.data_ptr())
        )

    @cached_property
    def gradient_specs(self) -> list[DTensorSpec]:
        """The parameters' own objects: an optimizer's ops then find equal specs by identity."""
        found = []
        for index, parameter in enumerate(self.parameters):
            spec, sharded = parameter.sharded_spec(self.placement(index), self.dtype), parameter.sharded
            own = spec_of(sharded) if isinstance(sharded, DTensor) else None
            found.append(own if own == spec else spec)
        return found

    # While the group computes

    def prepare(
        self,
        device: torch.device,
        whole: Allocation,
        gradients: Allocation,
        reduce_op: str,
        begin_gradients: Callable[[], GradientPlace],
    ) -> None:
        """Reserve the buffers of the running group; ``begin_gradients`` is called before the first gradient and says where
        gradients go."""
        refuse_hooks((p.name, local_of(p.sharded)) for p in self.parameters if isinstance(p.sharded, DTensor))
        mesh, axes = self.axes.mesh, self.axes
        self.whole = DBuffer(self.group, mesh, axes.gathered(), dtype=self.compute_dtype, allocation=whole)
        self._own_piece = self.whole.piece([axes.shard])
        unreduced = axes.unreduced(reduce_op)
        apart = DBuffer(self.group, mesh, unreduced, dtype=self.reduce_dtype, allocation=gradients)
        over_whole = self.whole.over(unreduced) if self.compute_dtype == self.reduce_dtype else None
        self.unreduced.prepare(self.whole, apart, over_whole, sums=reduce_op == "sum", begin=begin_gradients)
        self._pieces: dict[str, DBuffer] = {}
        self._gathers_as_is = self.compute_dtype == self.dtype and self.shards.device == device

    def gather(self, asker: str, custom: Any = None) -> PendingBuffer:
        """All-gather the parameters into ``whole``, from where they lie; only a cast or a device is crossed by a copy."""
        source = self.shards if self._gathers_as_is else self._own_piece.copy_(self.shards)
        if custom is None:
            return source.all_gather((self.axes.shard,), out=self.whole, asker=asker)
        group = self.axes.mesh.get_group(self.axes.shard)
        work = custom(output_tensor=self.whole.local, input_tensor=source.local, group=group, async_op=True)
        return PendingBuffer(self.whole, Pending(self.whole.local, [work]))

    def reduce_scatter(
        self, op: str, group: dist.ProcessGroup | None, custom: Any, asker: str, *, at_once: bool = False
    ) -> PendingBuffer:
        """Start to reduce :attr:`unreduced` gradients, which are complete, over the shard axis, in a piece of new memory
        that lies as the shards do."""
        return self._reduce_into(self._new_piece(op), self.unreduced.buffer, op, group, custom, asker, at_once)

    def _new_piece(self, op: str) -> DBuffer:
        """Memory for reduced gradients."""
        geometry = self._pieces.get(op)
        if geometry is None:
            placements = self.axes.buffer_placements(RaggedShard(), Partial(op))
            geometry = self._pieces[op] = DBuffer(
                self.group, self.axes.mesh, placements, dtype=self.reduce_dtype, device=self.unreduced.buffer.device
            )
        return geometry.fresh()

    def _reduce_into(
        self,
        piece: DBuffer,
        gradients: DBuffer,
        op: str,
        group: dist.ProcessGroup | None,
        custom: Any,
        asker: str,
        at_once: bool,
    ) -> PendingBuffer:
        shard = (self.axes.shard,)
        if custom is None:
            return gradients.reduce_scatter(shard, op=op, out=piece, process_group=group, at_once=at_once, asker=asker)
        group = group or self.axes.mesh.get_group(self.axes.shard)
        how = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        work = custom(output_tensor=piece.local, input_tensor=gradients.local, group=group, op=how, async_op=True)
        return PendingBuffer(piece, Pending(piece.local, [work]))

    def make_unsharded(self, index: int) -> None:
        """A parameter's unsharded form: a view of ``whole``, which is allocated."""
        parameter = self.parameters[index]
        view = self.whole.alias(self.group.layout.offsets[index], parameter.shape)
        unsharded = parameter.make_unsharded(view, self.unreduced.receiver(index))
        unsharded.__dict__[GRADIENT_PLACE] = (self.unreduced, index)
        self.unreduced.parameters_changed()

    # Gradients, reduced

    def assign(self, index: int, reduced: torch.Tensor, received: int = 1) -> None:
        """Add one parameter's part of ``reduced``, this rank's piece, to the sharded gradient; ``received`` tells the axes
        along which it is pending still, as :meth:`UnreducedGradients.complete` does."""
        parameter = self.parameters[index]
        sharded = parameter.sharded
        if not sharded.requires_grad:
            return
        part, spec = self.part(reduced, index), self.gradient_specs[index]
        if received:
            parameter.pending = _axes_of(received) if received > 1 else _NO_AXES
        if parameter.pending:
            pending = parameter.pending_at_rest
            placements = [Partial() if axis in pending else p for axis, p in enumerate(spec.placements)]
            spec = make_spec(spec.mesh, placements, parameter.global_shape, spec.stride, self.dtype)
        accumulated = sharded.grad
        if accumulated is None:
            sharded.grad = make_dtensor(part, spec)
        elif not isinstance(accumulated, DTensor):
            accumulated.add_(part)
        else:
            if accumulated.placements != spec.placements:  # autograd's, of a loss that read the sharded parameter
                accumulated = sharded.grad = redistribute(accumulated, spec.mesh, spec.placements)
            local_of(accumulated).add_(part)
        run_post_accumulate_hooks(sharded)

    # What is reported

    @property
    def resting_bytes(self) -> int:
        """Of this rank's parts, padding included."""
        return self.shards.num_bytes

    @property
    def gathered_bytes(self) -> int:
        """Of the buffer that an all-gather fills."""
        return self.shards.group.layout.buffer_size * self.compute_dtype.itemsize

    @property
    def padding_elements(self) -> int:
        """Of all ranks' parts together."""
        return self.shards.group.layout.buffer_size - sum(self.group.layout.numels)

    @property
    def description(self) -> str:
        """What must be equal on all ranks before the first collective."""
        names = ",".join(p.name for p in self.parameters)
        return (
            f"layout {self.group.layout.digest}, {self.dtype} gathered as {self.compute_dtype}, reduced as "
            f"{self.reduce_dtype}, requires_grad={self.requires_grad}, {names}"
        )


_NO_AXES: frozenset[int] = frozenset()


def _axes_of(received: int) -> frozenset[int]:
    return frozenset(axis for axis in range(received.bit_length()) if (received - 1) >> axis & 1)
