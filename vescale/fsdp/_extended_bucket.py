"""``ExtendedBucket``: parameters that are tensor subclasses, which are gathered by their own hooks."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.comm import Pending
from vescale.compat import local_of, make_dtensor, mesh_over, plain_parts, set_local, set_versions
from vescale.fsdp._extensions import gather_inputs, is_extended, require_hooks, unsharded_of
from vescale.fsdp._given_bucket import GivenBucket, pieces_of
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._phase import GradientPlace
from vescale.fsdp._preflight import ShardingMismatchError, compare_inputs
from vescale.fsdp._unreduced import UnreducedGradients

__all__ = ["ExtendedBucket"]

_Inputs = Sequence[Sequence[torch.Tensor]]
"""Of each parameter, what its hook wants to have gathered."""


class ExtendedBucket(GivenBucket):
    """A bucket of tensor subclasses with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, cut into chunks of dim 0.

    =============  ==================================  =================================================================
    what           memory                              when it is there
    =============  ==================================  =================================================================
    local tensors  the subclass's own, made by its     always (on the host when offloaded); there are no ``shards``
                   ``new_zeros`` and ``copy_``
    exchange       bytes: what the first hooks         from the start of a gather until it has been copied
                   return, piece after piece
    outputs        one tensor for each input, all      while the group is unsharded; the same storages each time
                   ranks' one after the other
    inner tensors  what the second hooks return        the same
    gradients      as in a :class:`GivenBucket`        from the first one on in memory of their own
    =============  ==================================  =================================================================

    The unsharded parameter is made of what the second hook returns at the first gather; later the hook is given it as
    ``out``, to fill it again.
    """

    # At rest

    def allocate_shards(self, device: torch.device, *, pin_memory: bool = False) -> None:
        """Note where local tensors belong; each gets memory of its own."""
        self.shards = self._new_shards(Allocation(device, pin_memory=pin_memory))

    def shard(self, index: int) -> torch.Tensor:
        sharded = self.parameters[index].sharded
        assert isinstance(sharded, DTensor)
        return local_of(sharded)

    def holds(self, index: int) -> bool:
        sharded = self.parameters[index].sharded
        if not isinstance(sharded, DTensor) or tuple(sharded.placements) != tuple(self._spec(index).placements):
            return False
        local = local_of(sharded)
        return is_extended(local) and local.dtype == self.dtype and self._is_at_home(local)

    def _spec(self, index: int) -> Any:
        return self.parameters[index].sharded_spec(self.placement(index), self.dtype)

    def _is_at_home(self, local: torch.Tensor) -> bool:
        if local.is_meta or local.device != self.shards.device:
            return local.device == self.shards.device
        return local.is_pinned() if self.shards.is_pinned else True

    def _bring_home(self, local: torch.Tensor) -> torch.Tensor:
        if local.device != self.shards.device:
            local = local.to(self.shards.device)
        return local if self._is_at_home(local) else local.pin_memory()

    def _own_chunk(self, whole_local: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of a whole (local) tensor, in memory of its own."""
        chunks = torch.chunk(whole_local, self.axes.shard_size)
        if self._rank < len(chunks):
            return self._bring_home(_copied(chunks[self._rank]))
        return self._bring_home(chunks[0].new_zeros((0, *whole_local.shape[1:])))

    def cut(self, whole_locals: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for index, (parameter, tensor) in enumerate(zip(self.parameters, whole_locals, strict=True)):
                parameter.make_sharded(self._own_chunk(tensor), self.placement(index))

    def copy(self, parameters: Sequence[ManagedParameter]) -> ExtendedBucket:
        twin = copy.copy(self)
        twin.__dict__.pop("_gathered", None)
        twin.parameters = list(parameters)
        twin.unreduced = UnreducedGradients(twin.parameters)
        for index, (parameter, original) in enumerate(zip(twin.parameters, self.parameters, strict=True)):
            with torch.no_grad():
                local = twin._bring_home(_copied(self.shard(index)))
            data = make_dtensor(local, self._spec(index))
            parameter.sharded = nn.Parameter(data, requires_grad=original.sharded.requires_grad)
        return twin

    def adopt(self) -> None:
        """Take the registered parameters as they are: on another device, of another dtype, or whole, which are cut."""
        for index, parameter in enumerate(self.parameters):
            found, spec = parameter.sharded, self._spec(index)
            if tuple(found.shape) != parameter.global_shape:
                raise ValueError(
                    f"parameter {parameter.name!r} of shape {parameter.global_shape} was replaced by one of shape "
                    f"{tuple(found.shape)}; give one of the same shape"
                )
            with torch.no_grad():
                if not isinstance(found, DTensor):
                    parameter.make_sharded(self._own_chunk(found), self.placement(index))
                    continue
                local = self._bring_home(parameter.local_as(spec))
            if tuple(found.placements) != tuple(spec.placements):
                parameter.make_sharded(local, self.placement(index))
            elif local is not local_of(found):
                set_local(found, local)

    # While the group computes

    def prepare(
        self,
        device: torch.device,
        whole: Allocation,
        gradients: Allocation,
        reduce_op: str,
        begin_gradients: Callable[[], GradientPlace],
    ) -> None:
        """Reserve room for gradients; what the hooks return is allocated and freed with ``whole`` from the first gather on.

        Raises ValueError, or NotImplementedError, for parameters without hooks.
        """
        for index, parameter in enumerate(self.parameters):
            require_hooks(parameter.name, self.shard(index))

        def begin() -> GradientPlace:
            begin_gradients()
            return GradientPlace.APART  # there is no place where the parameters were: it may be of any dtype and size

        unreduced = self.axes.unreduced(reduce_op)
        apart = DBuffer(self.group, self.axes.mesh, unreduced, dtype=self.reduce_dtype, allocation=gradients)
        self.unreduced.prepare(apart, apart, None, sums=reduce_op == "sum", begin=begin)
        self._device, self._memory = device, whole
        self._gathered: _Gathered | None = None
        self._made: dict[int, torch.Tensor] = {}

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """The shard axis alone, for the hooks."""
        mesh, axis = self.axes.mesh, self.axes.shard
        if mesh.ndim == 1:
            return mesh
        if mesh.mesh_dim_names is not None:
            return mesh[mesh.mesh_dim_names[axis]]
        group = mesh.get_group(axis)
        return mesh_over(mesh.device_type, torch.tensor(dist.get_process_group_ranks(group)), ("shard",), [group])

    def gather(self, asker: str, custom: Any = None) -> PendingBuffer:
        """Ask the hooks what to gather, and gather all of it as bytes; the other hooks get it when it is there."""
        with torch.inference_mode(False), torch.no_grad():
            inputs, metadata = self._ask(asker)
            gathered = self._gathered
            assert gathered is not None
            wide = gathered.exchange.fresh()
            piece = wide.piece((self.axes.shard,))
            for source, target in zip(_flat(inputs), gathered.places(piece.local), strict=True):
                target.copy_(source)
        if custom is None:
            pending: Any = piece.all_gather((self.axes.shard,), out=wide, asker=asker)
        else:
            group = self.axes.mesh.get_group(self.axes.shard)
            pending = Pending(
                wide.local, [custom(output_tensor=wide.local, input_tensor=piece.local, group=group, async_op=True)]
            )

        def copy_out() -> None:
            pending.wait()
            gathered.fill(wide)
            wide.free()

        # Two steps, so that whoever waits again after an error of a hook calls the hooks again, and nothing else.
        copied = Pending(wide.local, (), copy_out)
        return PendingBuffer(wide, Pending(wide.local, [copied], lambda: self._give(metadata)))

    def _ask(self, asker: str) -> tuple[list[tuple[torch.Tensor, ...]], list[Any]]:
        """Inputs and metadata of each parameter.

        Raises ShardingMismatchError, on all ranks, when the ranks want to gather different things at first; RuntimeError
        when a hook wants something else later.
        """
        try:
            answers = [self._ask_one(index) for index in range(len(self.parameters))]
        except Exception as error:
            if self._gathered is None:  # the other ranks raise, too, instead of waiting
                with contextlib.suppress(ShardingMismatchError):
                    compare_inputs(asker, f"raising {type(error).__name__}: {error}", [], self._along)
            raise
        inputs, metadata = [answer[0] for answer in answers], [answer[1] for answer in answers]
        if self._gathered is None:
            names = [parameter.name for parameter in self.parameters]
            compare_inputs(asker, "answering", list(zip(names, map(_text, inputs), strict=True)), self._along)
            self._gathered = _Gathered(self, inputs)
            for output in _flat(self._gathered.outputs):
                self._memory.attach(output.untyped_storage())
        for parameter, now, first in zip(self.parameters, inputs, self._gathered.inputs, strict=True):
            if _signature(now) != first:
                outputs = ", ".join(f"{dtype} {shape}" for dtype, shape in first)
                raise RuntimeError(
                    f"fsdp_pre_all_gather of parameter {parameter.name!r} returned tensors {_text(now)}, and at the first "
                    f"gather {outputs}; expected the same dtypes and shapes each time"
                )
        return inputs, metadata

    @property
    def _along(self) -> dist.ProcessGroup:
        return self.axes.mesh.get_group(self.axes.shard)

    def _ask_one(self, index: int) -> tuple[tuple[torch.Tensor, ...], Any]:
        parameter, local = self.parameters[index], self.shard(index)
        if local.device != self._device:
            local = local.to(self._device, non_blocking=True)
        module = parameter.slots[0].module
        inputs, metadata = gather_inputs(parameter.name, local, self._mesh, parameter.shape, module, self.mp_policy)
        for tensor in inputs:
            if tensor.device != self._device:
                raise ValueError(
                    f"fsdp_pre_all_gather of parameter {parameter.name!r} returned a tensor on {tensor.device}; expected "
                    f"{self._device}, where the group computes"
                )
        return inputs, metadata

    def _give(self, metadata: Sequence[Any]) -> None:
        """Let the hooks make the unsharded tensors, or fill them again, from what was gathered."""
        gathered = self._gathered
        assert gathered is not None
        with torch.inference_mode(False), torch.no_grad():
            for index, (parameter, outputs) in enumerate(zip(self.parameters, gathered.outputs, strict=True)):
                hook = self.shard(index).fsdp_post_all_gather  # type: ignore[attr-defined]
                unsharded = parameter.unsharded
                if unsharded is not None:
                    forms = [unsharded, *([local_of(unsharded)] if isinstance(unsharded, DTensor) else [])]
                    versions = [form._version for form in forms]
                    hook(outputs, metadata[index], self.compute_dtype, out=unsharded)
                    # The same values are there again: what autograd has saved of them is as good as it was.
                    set_versions(forms, versions)
                elif index not in self._made:
                    answer = hook(outputs, metadata[index], self.compute_dtype)
                    self._made[index], inner = unsharded_of(parameter.name, parameter.shape, answer)
                    for tensor in inner:
                        self._memory.attach(tensor.untyped_storage())

    def make_unsharded(self, index: int) -> None:
        """A parameter's unsharded form: what its hook has returned."""
        parameter = self.parameters[index]
        made = self._made.pop(index, None)
        if made is None:  # frozen or thawed since
            assert parameter.unsharded is not None
            with torch.no_grad():
                made = parameter.unsharded.detach()
            made = local_of(made) if isinstance(made, DTensor) else made
        parameter.make_unsharded(made, self.unreduced.receiver(index))
        self.unreduced.parameters_changed()

    # What is reported

    @property
    def resting_bytes(self) -> int:
        return sum(part.nbytes for index in range(len(self.parameters)) for part in plain_parts(self.shard(index)))

    @property
    def gathered_bytes(self) -> int:
        gathered = self.__dict__.get("_gathered")
        return super().gathered_bytes if gathered is None else gathered.exchange.num_bytes

    @property
    def padding_elements(self) -> int:
        return 0

    @property
    def description(self) -> str:
        kinds = ",".join(type(self.shard(index)).__name__ for index in range(len(self.parameters)))
        return f"{super().description}, gathered by the hooks of {kinds}"


_Signature = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class _Gathered:
    """What a bucket's hooks want to have gathered, its places in the exchange, and the memory that it is gathered to."""

    def __init__(self, bucket: ExtendedBucket, inputs: _Inputs) -> None:
        axes = bucket.axes
        self.inputs = [_signature(one) for one in inputs]
        self._num_ranks = axes.shard_size
        kinds = [kind for one in self.inputs for kind in one]
        alignment = math.lcm(bucket.alignment_bytes, *(dtype.itemsize for dtype, _ in kinds))
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        piece = TensorGroup.plan(
            {str(number): (size,) for number, size in enumerate(sizes)},
            1,
            dtypes=(torch.uint8,),
            alignment_bytes=alignment,
        ).layout
        self._kinds = [(*place, *kind) for place, kind in zip(zip(piece.offsets, sizes), kinds, strict=True)]
        group = pieces_of(piece.shard_size, self._num_ranks, (torch.uint8,), alignment)
        device = bucket._device
        self.exchange = DBuffer(group, axes.mesh, axes.gathered(), dtype=torch.uint8, device=device)
        """The geometry of the buffer; it never has memory itself."""
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
        """The place of each input in a rank's piece of the exchange."""
        for offset, size, dtype, shape in self._kinds:
            yield piece[offset : offset + size].view(dtype).view(shape)

    def fill(self, exchange: DBuffer) -> None:
        """Copy what was gathered to the outputs, in which what comes from the ranks lies one after the other."""
        wide = exchange.local.view(self._num_ranks, -1)
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


def _copied(local: torch.Tensor) -> torch.Tensor:
    """The same values in new memory, by the ops that a subclass must have to be sharded at all."""
    new = local.new_zeros(local.size())
    new.copy_(local)
    return new
