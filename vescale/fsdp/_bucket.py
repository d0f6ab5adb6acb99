"""``Bucket``: the parameters of a group that have one dtype, one ``requires_grad`` and one kind of layout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial

from vescale.buffer import Allocation, DBuffer, PendingBuffer
from vescale.comm import Pending
from vescale.compat import (
    DTensorSpec,
    local_of,
    make_dtensor,
    make_spec,
    run_post_accumulate_hooks,
    spec_of,
)
from vescale.fsdp._axes import DataParallelAxes
from vescale.fsdp._extensions import refuse_hooks
from vescale.fsdp._gather import BufferGather
from vescale.fsdp._hook_gather import HookGather
from vescale.fsdp._layout import CallerLayout, Layout, PlannedLayout
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._shards import BufferShards, Shards, SubclassShards
from vescale.fsdp._unreduced import GradientPlace, UnreducedGradients
from vescale.placements import RaggedShard, redistribute

__all__ = ["GRADIENT_PLACE", "Bucket"]

GRADIENT_PLACE = "_vescale_gradient_place"
"""Attribute of unsharded parameters: (:class:`UnreducedGradients`, index), for ops that write gradients to their place."""


class Bucket:
    """Parameters that are moved by one collective, and the buffers for it.

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

    What differs between kinds of parameters is in three collaborators:

    ==========================  ========================  =======================  =====================================
    kind                        ``layout``                ``at_rest``              ``gathering``
    ==========================  ========================  =======================  =====================================
    plain                       :class:`PlannedLayout`    :class:`BufferShards`    :class:`BufferGather`
    a cut that the caller asks  :class:`CallerLayout`     :class:`BufferShards`    :class:`BufferGather`
    for
    tensor subclass             :class:`CallerLayout`     :class:`SubclassShards`  :class:`HookGather`, without ``whole``
    ==========================  ========================  =======================  =====================================

    Args:
        parameters: of one :meth:`kind`.
        locals_: whole local tensors of one dtype, the parameters' values.
        layout: of the same parameters, maybe in another dtype, to be kept if it is the planner's.
    """

    @staticmethod
    def kind(parameter: ManagedParameter) -> str:
        """Parameters of one bucket have the same."""
        if parameter.is_extended:
            return "subclass"
        return "plain" if parameter.given is None else "given"

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        locals_: Sequence[torch.Tensor],
        axes: DataParallelAxes,
        *,
        mp_policy: MixedPrecisionPolicy,
        alignment_bytes: int,
        layout: Layout | None = None,
    ) -> None:
        param_dtype = mp_policy.param_dtype
        self.mp_policy = mp_policy
        self.parameters = list(parameters)
        self.axes = axes
        self.dtype = locals_[0].dtype
        self.device = locals_[0].device
        self.requires_grad = any(p.requires_grad for p in parameters)
        self.compute_dtype = param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype
        self.reduce_dtype = mp_policy.reduce_dtype or self.compute_dtype
        kind = self.kind(self.parameters[0])
        if isinstance(layout, PlannedLayout):
            layout = copy.copy(layout)
            layout.parameters = self.parameters
        else:
            plan = PlannedLayout if kind == "plain" else CallerLayout
            dtypes = {self.dtype, self.compute_dtype, self.reduce_dtype}
            layout = plan(self.parameters, axes, dtypes, alignment_bytes)
        self.layout = layout
        self.at_rest: Shards
        if kind == "subclass":
            assert isinstance(layout, CallerLayout)
            self.at_rest = SubclassShards(layout, self.dtype)
        else:
            self.at_rest = BufferShards(layout, self.dtype)
        self.gathering: BufferGather | HookGather
        self.unreduced = UnreducedGradients(self.parameters)

    # At rest

    @property
    def shards(self) -> DBuffer:
        """This rank's piece; of tensor subclasses without memory."""
        return self.at_rest.buffer

    def part(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's part of any flat piece that is laid out as the shards are."""
        offset, shape = self.layout.slot(index)
        part = flat.narrow(0, offset, math.prod(shape))
        return part if len(shape) == 1 else part.view(shape)

    def cut(self, whole_locals: Sequence[torch.Tensor]) -> None:
        """Take this rank's part of each whole (local) or deferred tensor, and register the sharded forms."""
        with torch.no_grad():
            for index, (parameter, tensor) in enumerate(zip(self.parameters, whole_locals, strict=True)):
                parameter.make_sharded(self.at_rest.cut(index, tensor), self.layout.placement(index))

    def adopt(self) -> None:
        """Make the registered parameters, whose memory is elsewhere, this bucket's shards."""
        with torch.no_grad():
            for index in range(len(self.parameters)):
                self.at_rest.adopt(index)

    @cached_property
    def gradient_specs(self) -> list[DTensorSpec]:
        """The parameters' own objects: an optimizer's ops then find equal specs by identity."""
        found = []
        for index, parameter in enumerate(self.parameters):
            spec, sharded = parameter.sharded_spec(self.layout.placement(index), self.dtype), parameter.sharded
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
        gradients go.

        Raises ValueError, or NotImplementedError, for parameters without the all-gather hooks that they need.
        """
        mesh, axes = self.axes.mesh, self.axes
        placements = axes.unreduced(reduce_op)
        apart = DBuffer(self.layout.whole, mesh, placements, dtype=self.reduce_dtype, allocation=gradients)
        if isinstance(self.at_rest, SubclassShards):
            self.gathering = HookGather(self.at_rest, self.mp_policy, self.compute_dtype, device, whole)

            def begin() -> GradientPlace:
                begin_gradients()
                return GradientPlace.APART  # what was gathered may be of any dtype and size

            self.unreduced.prepare(apart, apart, None, sums=reduce_op == "sum", begin=begin)
        else:
            refuse_hooks((p.name, local_of(p.sharded)) for p in self.parameters if isinstance(p.sharded, DTensor))
            self.gathering = BufferGather(self.at_rest, self.compute_dtype, device, whole)
            over_whole = self.whole.over(placements) if self.compute_dtype == self.reduce_dtype else None
            self.unreduced.prepare(self.whole, apart, over_whole, sums=reduce_op == "sum", begin=begin_gradients)
        self._geometry: dict[str, DBuffer] = {}

    @property
    def whole(self) -> DBuffer:
        """What is gathered to. Not for tensor subclasses."""
        assert isinstance(self.gathering, BufferGather)
        return self.gathering.whole

    def make_unsharded(self, index: int) -> None:
        """A parameter's unsharded form, over memory that is allocated."""
        parameter = self.parameters[index]
        unsharded = parameter.make_unsharded(
            self.gathering.unsharded(index, parameter.shape), self.unreduced.receiver(index)
        )
        if isinstance(self.gathering, BufferGather):
            unsharded.__dict__[GRADIENT_PLACE] = (self.unreduced, index)
        self.unreduced.parameters_changed()

    def reduce_scatter(
        self, op: str, group: dist.ProcessGroup | None, custom: Any, requester: str, *, at_once: bool = False
    ) -> PendingBuffer:
        """Start to reduce :attr:`unreduced` gradients, which are complete, over the shard axis, in a piece of new memory
        that is laid out as the shards are."""
        axes, gradients, layout = self.axes, self.unreduced.buffer, self.layout
        if isinstance(layout, CallerLayout):
            exchange = self._new("exchange " + op, axes.unreduced(op))
            if layout.has_gaps:
                exchange.zero_()
            layout.copy(exchange, gradients, gathered=False)
            gradients = exchange
        piece = self._new("piece " + op, axes.buffer_placements(RaggedShard(), Partial(op)))
        if custom is None:
            return gradients.reduce_scatter(
                (axes.shard,), op=op, out=piece, process_group=group, at_once=at_once, requester=requester
            )
        group = group or axes.mesh.get_group(axes.shard)
        how = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        work = custom(output_tensor=piece.local, input_tensor=gradients.local, group=group, op=how, async_op=True)
        return PendingBuffer(piece, Pending(piece.local, [work]))

    def _new(self, what: str, placements: Sequence[Any]) -> DBuffer:
        """Memory for gradients on their way."""
        geometry = self._geometry.get(what)
        if geometry is None:
            geometry = self._geometry[what] = DBuffer(
                self.layout.exchanged,
                self.axes.mesh,
                placements,
                dtype=self.reduce_dtype,
                device=self.unreduced.buffer.device,
            )
        return geometry.fresh()

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
    def gathered_bytes(self) -> int:
        """Of the buffer that an all-gather fills."""
        if "gathering" in self.__dict__:
            return self.gathering.num_bytes
        return self.layout.exchanged.layout.buffer_size * self.compute_dtype.itemsize

    @property
    def description(self) -> str:
        """What must be equal on all ranks before the first collective."""
        names = ",".join(p.name for p in self.parameters)
        text = (
            f"layout {self.layout.whole.layout.digest}, {self.dtype} gathered as {self.compute_dtype}, reduced as "
            f"{self.reduce_dtype}, requires_grad={self.requires_grad}, {names}"
        )
        if not isinstance(self.at_rest, SubclassShards):
            return text
        kinds = ",".join(type(self.at_rest.local(index)).__name__ for index in range(len(self.parameters)))
        return f"{text}, gathered by the hooks of {kinds}"


_NO_AXES: frozenset[int] = frozenset()


def _axes_of(received: int) -> frozenset[int]:
    return frozenset(axis for axis in range(received.bit_length()) if (received - 1) >> axis & 1)
