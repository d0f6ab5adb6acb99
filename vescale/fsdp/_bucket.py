"""``Bucket``: the parameters of a group that have one dtype, one ``requires_grad`` and one kind of layout."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, DBuffer
from vescale.checks import sum_of_bits
from vescale.compat import local_of, set_local
from vescale.errors import WrittenParameterError
from vescale.fsdp._extensions import refuse_hooks
from vescale.fsdp._gather import BufferGather
from vescale.fsdp._hook_gather import HookGather
from vescale.fsdp._layout import CallerLayout, Layout, PlannedLayout
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._shards import BufferShards, Shards, SubclassShards
from vescale.gradients import DataParallelAxes, GradientPlace, ShardedGradients, UnreducedGradients

__all__ = ["GRADIENT_PLACE", "Bucket", "PlaceOfGradient"]

GRADIENT_PLACE = "_vescale_gradient_place"
"""Attribute of unsharded parameters: :class:`PlaceOfGradient`, for ops that write gradients to their place."""


class PlaceOfGradient:
    """Of a parameter: the :class:`UnreducedGradients` that take its gradient, and its index there.

    The reference is weak, because the garbage collector does not collect what an attribute of a parameter refers to while a
    graph has the parameter.
    """

    def __init__(self, unreduced: UnreducedGradients, index: int) -> None:
        self._unreduced, self.index = weakref.ref(unreduced), index

    @property
    def unreduced(self) -> UnreducedGradients | None:
        return self._unreduced()

    def __reduce__(self) -> Any:
        return type(None), ()  # a parameter that is loaded has no such place


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
    with the caller's layout    :class:`CallerLayout`     :class:`BufferShards`    :class:`BufferGather`
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

    def allocate_shards(self, device: torch.device, *, pin_memory: bool) -> None:
        self.at_rest.allocate(device, pin_memory=pin_memory)
        layout = self.layout
        self.gradients = ShardedGradients(
            self.parameters, self.axes, layout.slots, layout.to_exchange, self.dtype, device
        )
        self.unreduced = self.gradients.unreduced

    # At rest

    @property
    def shards(self) -> DBuffer:
        """This rank's piece; of tensor subclasses without memory."""
        return self.at_rest.buffer

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

    # While the group computes

    def prepare(
        self,
        device: torch.device,
        gathered: Allocation,
        pool: Any,
        reduce_op: str,
        begin_gradients: Callable[[], GradientPlace],
    ) -> None:
        """Reserve the buffers of the running group; ``begin_gradients`` is called before the first gradient and says where
        gradients go, those of tensor subclasses excepted: what these gather may be of any dtype and size.

        Raises ValueError, or NotImplementedError, for parameters without the all-gather hooks that they need.
        """
        whole = None
        if isinstance(self.at_rest, SubclassShards):
            self.gathering = HookGather(self.at_rest, self.mp_policy, self.compute_dtype, device, gathered)
        else:
            refuse_hooks((p.name, local_of(p.sharded)) for p in self.parameters if isinstance(p.sharded, DTensor))
            self.gathering = BufferGather(self.at_rest, self.compute_dtype, device, gathered)
            whole = self.gathering.whole
        memory, placements = Allocation(device, pool=pool), self.axes.unreduced(reduce_op)
        apart = DBuffer(self.layout.whole, self.axes.mesh, placements, dtype=self.reduce_dtype, allocation=memory)
        self.unreduced.prepare(whole, apart, of_one_loss=reduce_op == "sum", begin=begin_gradients)

    @property
    def whole(self) -> DBuffer:
        """What is gathered to. Not for tensor subclasses."""
        assert isinstance(self.gathering, BufferGather)
        return self.gathering.whole

    def make_unsharded(self, index: int) -> None:
        """A parameter's unsharded form, over memory that is allocated."""
        parameter = self.parameters[index]
        unsharded = parameter.make_unsharded(self.gathering.unsharded(index, parameter.shape))
        if isinstance(self.gathering, BufferGather):
            unsharded.__dict__[GRADIENT_PLACE] = PlaceOfGradient(self.unreduced, index)
        self.unreduced.watch(index, unsharded)

    def write_back(self, index: int, path: str) -> str:
        """Write this rank's part of an unsharded parameter, which the caller's code has changed, to the sharded one. Returns
        what every rank must have written alike, in short; waits for the device.

        Raises WrittenParameterError where the gathered copy is of another dtype or shape, or a tensor subclass.
        """
        parameter, unsharded = self.parameters[index], self.parameters[index].unsharded
        assert unsharded is not None
        written = local_of(unsharded) if isinstance(unsharded, DTensor) else unsharded.detach()
        is_subclass = not isinstance(self.gathering, BufferGather)
        if is_subclass or tuple(written.shape) != parameter.shape or written.dtype != self.dtype:
            what = (
                "a tensor subclass" if is_subclass else f"gathered as {written.dtype} of shape {tuple(written.shape)}"
            )
            raise WrittenParameterError(
                f"parameter {parameter.name!r} of {path or 'the root'}, of {self.dtype} and shape {parameter.shape}, was "
                f"written to inside of a forward or backward, where it is {what}: the write would be lost, or rounded. "
                "Write to it outside of the forward, where it is the sharded parameter, or leave it out of the group "
                "(ignored_params)"
            )
        with torch.inference_mode(False), torch.no_grad():
            place = self.gathering.unsharded(index, parameter.shape)
            if written.data_ptr() != place.data_ptr():  # it got other data: p.data = ...
                place.copy_(written)
                if isinstance(unsharded, DTensor):
                    set_local(unsharded, place)
                else:
                    unsharded.data = place
            self.at_rest.cut(index, place)
        return f"sum of bits {sum_of_bits(place):x}"

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
