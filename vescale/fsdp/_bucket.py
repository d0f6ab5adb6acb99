"""``Bucket``: the parameters of a group that have one dtype, one ``requires_grad`` and one kind of layout."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.checks import sum_of_bits
from vescale.comm import Pending
from vescale.compat import DATA_VIEWS, local_of, mesh_over, own_part, reduce_dtype_of, set_local, set_versions
from vescale.errors import FullyShardStateError, GatherHookError, ShardingMismatchError
from vescale.fsdp._extensions import gather_inputs, refuse_hooks, require_hooks, unsharded_of
from vescale.fsdp._gather import BufferGather, all_gather
from vescale.fsdp._layout import CallerLayout, Layout, PlannedLayout, equal_pieces
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._preflight import compare_inputs
from vescale.fsdp._shards import BufferShards, Shards, SubclassShards
from vescale.gradients import DataParallelAxes, GradientPlace, OrderedUnit, ShardedGradients, UnreducedGradients

# ``HookGather``: the all-gather of tensor subclasses, by their own hooks.

_Inputs = Sequence[Sequence[torch.Tensor]]
"""Of each parameter, what its hook wants to have gathered."""


class HookGather:
    """Gathers what ``fsdp_pre_all_gather`` returns, as bytes, and gives it to ``fsdp_post_all_gather``.

    =============  ==================================  =================================================================
    what           memory                              when it is there
    =============  ==================================  =================================================================
    exchange       bytes: what the first hooks         from the start of a gather until it has been copied
                   return, piece after piece
    outputs        one tensor for each input, all      while the group is unsharded; the same storages each time
                   ranks' one after the other
    inner tensors  what the second hooks return        the same
    =============  ==================================  =================================================================

    The unsharded parameter is made of what the second hook returns at the first gather; later the hook is given it as
    ``out``, to fill it again.

    Args:
        dtype: of the computation; a hook may return another one.
        memory: outputs and inner tensors are allocated and freed with it, from the first gather on.

    Raises:
        ValueError, NotImplementedError: a parameter with one of the two hooks, or none.
    """

    def __init__(
        self,
        shards: SubclassShards,
        mp_policy: MixedPrecisionPolicy,
        dtype: torch.dtype,
        device: torch.device,
        memory: Allocation,
    ) -> None:
        self._parameters, self._axes = shards.layout.parameters, shards.layout.axes
        for index, parameter in enumerate(self._parameters):
            require_hooks(parameter.name, shards.local(index))
        self._layout, self._shards = shards.layout, shards
        self._mp_policy, self._dtype, self._device, self._memory = mp_policy, dtype, device, memory
        self.exchange: Exchange | None = None
        self._made: dict[int, torch.Tensor] = {}

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The shard axis alone, for the hooks."""
        mesh, axis = self._axes.mesh, self._axes.shard
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is not None:
            return mesh[mesh.mesh_dim_names[axis]]
        ranks = dist.get_process_group_ranks(self._group)
        return mesh_over(mesh.device_type, torch.tensor(ranks), ("shard",), [self._group])

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._axes.shard_group

    def start(self, unit: OrderedUnit, requester: str, custom: Any = None) -> PendingBuffer:
        """Ask the hooks what to gather, and gather all of it; the other hooks get it when it is there. Raises as
        :meth:`BufferGather.start` does."""
        with torch.inference_mode(False), torch.no_grad():
            inputs, metadata = self._ask(requester)
            exchange = self.exchange
            assert exchange is not None
            wide = exchange.buffer.fresh()
            piece = wide.piece((self._axes.shard,))
            for source, target in zip(_flat(inputs), exchange.places(piece.local), strict=True):
                target.copy_(source)
            unit.begins_gather(wide.local.nbytes // self._axes.shard_size)
        pending = all_gather(piece, wide, self._axes, requester, custom)

        def copy_out() -> None:
            pending.wait()
            unit.check_gathered(wide.local)
            exchange.fill_outputs(wide)
            wide.free()

        # Two steps, so that waiting again after an error of a hook calls the hooks again, and nothing else.
        copied = Pending(wide.local, (), copy_out)
        return PendingBuffer(wide, Pending(wide.local, [copied], lambda: self._give(metadata)))

    def _ask(self, requester: str) -> tuple[list[tuple[torch.Tensor, ...]], list[Any]]:
        """Inputs and metadata of each parameter.

        Raises ShardingMismatchError, on all ranks, when the ranks want to gather different things at first; RuntimeError
        when a hook wants something else later.
        """
        try:
            answers = [self._ask_one(index) for index in range(len(self._parameters))]
        except Exception as error:
            if self.exchange is None:  # the other ranks raise, too, instead of waiting
                with contextlib.suppress(ShardingMismatchError):
                    compare_inputs(requester, f"raising {type(error).__name__}: {error}", [], self._group)
            raise
        inputs, metadata = [answer[0] for answer in answers], [answer[1] for answer in answers]
        if self.exchange is None:
            names = [parameter.name for parameter in self._parameters]
            compare_inputs(requester, "answering", list(zip(names, map(_text, inputs), strict=True)), self._group)
            self.exchange = Exchange(inputs, self._axes, self._device, self._layout.alignment_bytes)
            for output in _flat(self.exchange.outputs):
                self._memory.attach(output.untyped_storage())
        for parameter, now, first in zip(self._parameters, inputs, self.exchange.inputs, strict=True):
            if _signature(now) != first:
                outputs = ", ".join(f"{dtype} {shape}" for dtype, shape in first)
                raise GatherHookError(
                    f"fsdp_pre_all_gather of parameter {parameter.name!r} returned tensors {_text(now)}, and at the first "
                    f"gather {outputs}; expected the same dtypes and shapes each time"
                )
        return inputs, metadata

    def _ask_one(self, index: int) -> tuple[tuple[torch.Tensor, ...], Any]:
        parameter, local = self._parameters[index], self._shards.local(index)
        if local.device != self._device:
            local = local.to(self._device, non_blocking=True)
        module = parameter.slots[0].module
        inputs, metadata = gather_inputs(parameter.name, local, self._mesh, parameter.shape, module, self._mp_policy)
        for tensor in inputs:
            if tensor.device != self._device:
                raise GatherHookError(
                    f"fsdp_pre_all_gather of parameter {parameter.name!r} returned a tensor on {tensor.device}; expected "
                    f"{self._device}, where the group computes"
                )
        return inputs, metadata

    def _give(self, metadata: Sequence[Any]) -> None:
        """Let the hooks make the unsharded tensors, or fill them again, from what was gathered."""
        assert self.exchange is not None
        with torch.inference_mode(False), torch.no_grad():
            for index, (parameter, outputs) in enumerate(zip(self._parameters, self.exchange.outputs, strict=True)):
                hook = self._shards.local(index).fsdp_post_all_gather  # type: ignore[attr-defined]
                unsharded = parameter.unsharded
                if unsharded is not None:
                    forms = [unsharded, *([local_of(unsharded)] if isinstance(unsharded, DTensor) else [])]
                    versions = [form._version for form in forms]
                    hook(outputs, metadata[index], self._dtype, out=unsharded)
                    # The same values are there again: what autograd has saved of them is as good as it was.
                    set_versions(forms, versions)
                elif index not in self._made:
                    answer = hook(outputs, metadata[index], self._dtype)
                    self._made[index], inner = unsharded_of(parameter.name, parameter.shape, answer)
                    for tensor in inner:
                        self._memory.attach(tensor.untyped_storage())

    def unsharded(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter as its hook has returned it."""
        made = self._made.pop(index, None)
        if made is None:  # frozen or thawed since
            unsharded = self._parameters[index].unsharded
            assert unsharded is not None
            with torch.no_grad():
                made = unsharded.detach()
            made = own_part(made)
        return made

    def keep_piece(self, neighbours: dist.ProcessGroup) -> None:
        """Keeps nothing: backward gathers from all ranks."""

    def drop_piece(self) -> None: ...

    kept_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of the buffer that the all-gather fills; before the first gather as for plain tensors."""
        if self.exchange is None:
            return self._layout.exchanged.layout.buffer_size * self._dtype.itemsize
        return self.exchange.buffer.num_bytes


_Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class Exchange:
    """What hooks want to have gathered: its places in one buffer of bytes, and the memory that it is copied to.

    Attributes:
        inputs: dtypes and shapes, by parameter.
        outputs: for each input what the ranks have gathered, one after the other; by parameter.
        buffer: the geometry of the buffer that is gathered; it never has memory itself.
    """

    def __init__(self, inputs: _Inputs, axes: DataParallelAxes, device: torch.device, alignment_bytes: int) -> None:
        self.inputs = [_signature(one) for one in inputs]
        self._num_ranks = axes.shard_size
        kinds = [kind for one in self.inputs for kind in one]
        alignment = math.lcm(alignment_bytes, *(dtype.itemsize for dtype, _ in kinds))
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        piece = TensorGroup.plan(
            {str(number): (size,) for number, size in enumerate(sizes)},
            1,
            dtypes=(torch.uint8,),
            alignment_bytes=alignment,
        ).layout
        self._kinds = [(*place, *kind) for place, kind in zip(zip(piece.offsets, sizes), kinds, strict=True)]
        group = equal_pieces(piece.shard_size, self._num_ranks, (torch.uint8,), alignment)
        self.buffer = DBuffer(group, axes.mesh, axes.gathered(), dtype=torch.uint8, device=device)
        self.outputs: list[tuple[torch.Tensor, ...]] = []
        self._rows: list[torch.Tensor] = []
        """The outputs' memory as (ranks, bytes), with version counters of their own: they are the same values each time."""
        for one in self.inputs:
            made = [torch.empty(_stacked(shape, self._num_ranks), dtype=dtype, device=device) for dtype, shape in one]
            self.outputs.append(tuple(made))
            for tensor in made:
                rows = torch.empty(0, dtype=torch.uint8, device=device)
                size = tensor.nbytes // self._num_ranks
                self._rows.append(rows.set_(tensor.untyped_storage(), 0, (self._num_ranks, size), (size, 1)))

    def places(self, piece: torch.Tensor) -> Iterator[torch.Tensor]:
        """The place of each input in a rank's piece of the buffer."""
        for offset, size, dtype, shape in self._kinds:
            yield piece[offset : offset + size].view(dtype).view(shape)

    def fill_outputs(self, gathered: DBuffer) -> None:
        wide = gathered.local.view(self._num_ranks, -1)
        with torch.no_grad():
            for rows, (offset, size, _, _) in zip(self._rows, self._kinds, strict=True):
                rows.copy_(wide[:, offset : offset + size])


def _stacked(shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    return (shape[0] * num_ranks, *shape[1:]) if shape else (num_ranks,)


def _signature(inputs: Sequence[torch.Tensor]) -> _Signature:
    return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in inputs)


def _text(inputs: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in _signature(inputs))


def _flat(inputs: _Inputs) -> Iterator[torch.Tensor]:
    return (tensor for one in inputs for tensor in one)


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
        self.reduce_dtype = reduce_dtype_of(mp_policy, self.dtype, self.compute_dtype)
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

    def make_unsharded(self, index: int, data_views: list[tuple[int, torch.Tensor]]) -> None:
        """A parameter's unsharded form, over memory that is allocated. ``data_views`` takes what its ``.data`` gives."""
        parameter = self.parameters[index]
        unsharded = parameter.make_unsharded(self.gathering.unsharded(index, parameter.shape))
        unsharded.__dict__[DATA_VIEWS] = data_views
        if isinstance(self.gathering, BufferGather):
            unsharded.__dict__[GRADIENT_PLACE] = PlaceOfGradient(self.unreduced, index)
        self.unreduced.watch(index, unsharded)

    def write_back(self, index: int, path: str) -> str:
        """Write this rank's part of an unsharded parameter, which the caller's code has changed, to the sharded one. Returns
        what every rank must have written alike, in short; waits for the device.

        Raises FullyShardStateError where the gathered copy is of another dtype or shape, or a tensor subclass.
        """
        parameter, unsharded = self.parameters[index], self.parameters[index].unsharded
        assert unsharded is not None
        written = local_of(unsharded) if isinstance(unsharded, DTensor) else unsharded.detach()
        is_subclass = not isinstance(self.gathering, BufferGather)
        if is_subclass or tuple(written.shape) != parameter.shape or written.dtype != self.dtype:
            what = (
                "a tensor subclass" if is_subclass else f"gathered as {written.dtype} of shape {tuple(written.shape)}"
            )
            raise FullyShardStateError(
                f"parameter {parameter.name!r} of {path or 'the root'}, of {self.dtype} and shape {parameter.shape}, "
                f"was written to during a forward or backward, in which it is {what}: the write would be lost, or "
                "rounded. Write to it outside of the forward, where it is the sharded parameter, or leave it out of "
                "the group (ignored_params)"
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
