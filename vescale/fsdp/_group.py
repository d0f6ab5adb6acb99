"""``ParameterGroup``: parameters that are gathered and reduced together."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from vescale.buffer import COLLECTIVE_ALIGNMENT_BYTES, Allocation, PendingBuffer
from vescale.compat import backend_memory_pool, profiled
from vescale.fsdp._axes import DataParallelAxes
from vescale.fsdp._context import CommContext
from vescale.fsdp._partial_reshard import KeptPieces
from vescale.fsdp._phase import GradientPlace, Phase
from vescale.fsdp._reduction import Reduction, ReductionOptions
from vescale.fsdp._registered import has_replaced
from vescale.fsdp._resting_group import GroupMember, RestingGroup

__all__ = ["BlockPolicy", "ParameterGroup"]

BlockPolicy = Callable[[str, nn.Parameter], int | None]


class ParameterGroup(RestingGroup):
    """Parameters that are gathered and reduced together, over given mesh axes; it knows nothing of modules' hooks.

    ====================  =====================  ==============================  =====================================
    phase                 registered parameters  gathered buffer                 gradients
    ====================  =====================  ==============================  =====================================
    at rest               sharded DTensors       no memory                       sharded ``.grad``
    forward               unsharded              all parameters                  -
    forward to backward   as                     kept (``reshard_after_forward`` -
                          reshard_after_forward  False), a part of it (a
                                                 number), or freed (True)
    backward              unsharded              all parameters, at its end      autograd's; at its end in the gathered
                                                 gradients                       buffer, where parameters were
    after backward        sharded DTensors       freed                           reduce-scattered, added to ``.grad``
    ====================  =====================  ==============================  =====================================

    Args:
        members: the parameters, in an order that is the same on every rank.
        axes: the mesh axes to shard and replicate over.
        reshard_after_forward: True, False, or the number of ranks to reshard to.
        mp_policy, offload_policy: PyTorch's.
        reduce_op: ``avg`` (every rank has its own loss) or ``sum`` (gradients are contributions to one loss).
        alignment_bytes: of shards and tensors.
        path: of the module, for messages and profiles.
    """

    def __init__(
        self,
        members: Sequence[GroupMember],
        axes: DataParallelAxes,
        *,
        reshard_after_forward: bool | int = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        reduce_op: str = "avg",
        alignment_bytes: int = COLLECTIVE_ALIGNMENT_BYTES,
        path: str = "",
    ) -> None:
        super().__init__(
            members,
            axes,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
            alignment_bytes=alignment_bytes,
        )
        self.path = path
        self.reshard_after_forward = reshard_after_forward
        self.is_kept_by_default = False
        """``reshard_after_forward`` is False for the group is the root's, and not because somebody asked for it."""
        self.reshard_after_backward = True
        self.reduce_gradients = True
        self.unshard_in_backward = True
        self.options = ReductionOptions(op=reduce_op)
        self.custom_all_gather: Any = None
        self._memory_pool: Any = None
        self.comm: CommContext | None = None
        self.on_gradients: Callable[[], None] = _nothing
        """Called when the first gradient of a backward is there, to see to its end; :class:`ModuleState` sets it."""
        self.phase = Phase.IDLE
        self._gathering: list[PendingBuffer] | None = None
        self._gathered_event: object = None
        self.is_unsharded = False
        self.is_lent = False
        """A reduction reads gradients from the memory that is gathered to."""
        self._weights_are_needed = False
        self._kept: KeptPieces | None = None
        self._carried: dict[int, Reduction] = {}
        self._needed_next: ParameterGroup | None = None
        self._forward_places: list[int] = []
        self._gradients_are_due = False
        self._keeps_for_graph = False
        """The backward that runs, or ran last, builds a graph (``create_graph``), whose ops read the parameters."""
        self._is_left = False
        """Gathered, with no backward in sight that will free it."""

    # Building

    def copy(self) -> ParameterGroup:
        """A group at rest with the same values in memory of its own. Its sharded parameters hang nowhere yet: the caller
        puts them, and the slots, into copies of the modules."""
        self.reshard()
        if self.is_stale:
            self.rebuild()
        twin = copy.copy(self)
        twin.__dict__.pop("_whole_memory", None)
        twin.options = dataclasses.replace(self.options)
        twins = {id(p): copy.copy(p) for p in self.parameters}
        twin.parameters = list(twins.values())
        twin.buckets = [bucket.copy([twins[id(p)] for p in bucket.parameters]) for bucket in self.buckets]
        for parameter in twin.parameters:
            parameter.unsharded = None
        twin.comm, twin.phase = None, Phase.IDLE
        twin._carried, twin._forward_places, twin._needed_next = {}, [], None
        twin._gradients_are_due = False
        twin._keeps_for_graph = twin._is_left = False
        twin.on_gradients = _nothing
        twin.is_lent = twin._weights_are_needed = False
        return twin

    def use_backend_memory(self, enable: bool) -> None:
        """Allocate communication buffers from the process group's own memory, where its backend has such."""
        group = self.axes.mesh.get_group(self.axes.shard)
        self._memory_pool = backend_memory_pool(group, self.device) if enable else None
        self._drop_unsharded()

    def _drop_unsharded(self) -> None:
        self.reshard()
        super()._drop_unsharded()
        self.__dict__.pop("_whole_memory", None)

    def prepare(self) -> None:
        """Before the first gather: the buffers of the running group.

        Raises RuntimeError for parameters on the meta device, or elsewhere than where the group computes.
        """
        if "_whole_memory" in self.__dict__:
            return
        on_meta = [p.name for p in self.parameters if p.sharded.is_meta]
        if on_meta:
            raise RuntimeError(
                f"parameters {', '.join(on_meta[:5])} of {self.path or 'the root'} are on the meta device; materialize them "
                "before the first forward: model.to_empty(device=...), then initialize or load a state dict"
            )
        self._whole_memory = Allocation(self.device, pool=self._memory_pool)
        self._gradient_memory: dict[int, Allocation] = {}
        self.comm = self.comm or CommContext(self.device)
        for bucket in self.buckets:
            if bucket.shards.device.type != ("cpu" if self.offloads else self.device.type):
                raise RuntimeError(
                    f"parameters of {self.path or 'the root'} are on {bucket.shards.device}, and the group computes on "
                    f"{self.device}{' with offload to cpu' if self.offloads else ''}; move the model with to_empty() or "
                    "to(), or load a state dict from that device"
                )
            memory = self._gradient_memory[id(bucket)] = Allocation(self.device, pool=self._memory_pool)
            bucket.prepare(self.device, self._whole_memory, memory, self.options.op, self._begin_gradients)

    def _begin_gradients(self) -> GradientPlace:
        """Room for a bucket's gradients, and where they go. They take the place of parameters that go when they are reduced,
        so that the two need memory once; earlier than that only if asked to, for somebody may read the parameters still."""
        assert self.comm is not None
        self.on_gradients()
        self.comm.make_room_for_gradients(self)
        if not (self.is_unsharded and self._goes_after_backward and self.reduce_gradients):
            return GradientPlace.APART
        at_once = self.options.in_place and not self._weights_are_needed
        return GradientPlace.IN_PLACE if at_once else GradientPlace.HELD

    # Unshard and reshard

    def unshard(self) -> None:
        """Start the all-gathers; nothing happens when they are running, or done."""
        if self._gathering is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self.phase is Phase.BACKWARD:
            return
        if self.is_lent:
            assert self.comm is not None
            self.comm.take_back_lent()
        if self.is_stale:
            self.rebuild()
        self.prepare()
        comm = self.comm
        assert comm is not None
        with profiled(f"vescale.fsdp::all_gather ({self.path})"):
            if comm.reclaim(self._whole_memory):
                self._gathering = []
                return
            if self._kept is not None:
                comm.gather_lane.wait_event(self._kept.copied)
            with comm.gather_lane(), torch.no_grad():
                comm.make_room()
                self._whole_memory.allocate()
                if self._kept is not None:
                    self._gathering = self._kept.gather(self.path, self.custom_all_gather)
                else:
                    self._gathering = [bucket.gather(self.path, self.custom_all_gather) for bucket in self.buckets]
                if comm.gather_lane.is_stream:
                    for pending in self._gathering:
                        pending.wait()
                    self._gathered_event = comm.gather_lane.done()

    @property
    def _goes_after_backward(self) -> bool:
        return self.reshard_after_backward and not self._keeps_for_graph

    def wait_for_unshard(self) -> None:
        """The gathered parameters are there for the current stream, and registered."""
        if self._gathering is None:
            return
        assert self.comm is not None
        if self.comm.gather_lane.is_stream:
            self.comm.gather_lane.compute_waits(self._gathered_event)
        else:
            for pending in self._gathering:
                pending.wait()
        self._gathering = None
        self._kept = None
        self._is_left = False
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                unsharded, sharded = parameter.unsharded, parameter.sharded
                if unsharded is None or unsharded.requires_grad != sharded.requires_grad:  # frozen or thawed in between
                    parameter.requires_grad = sharded.requires_grad
                    bucket.make_unsharded(index)
                assert parameter.unsharded is not None
                parameter.register(parameter.unsharded)
            bucket.requires_grad = any(p.requires_grad for p in bucket.parameters)
            bucket.unreduced.restore_versions()
        self.is_unsharded = True

    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones; in forward as ``reshard_after_forward`` says, but that
        nothing is kept for a backward that will not come."""
        if self.phase is Phase.FORWARD:
            comes_back = torch.is_grad_enabled()
            if self.reshard_after_forward is False and (comes_back or not self.is_kept_by_default):
                return
            if self.reshard_after_forward not in (True, False) and comes_back and self.is_unsharded:
                assert self.comm is not None
                self._kept = KeptPieces.keep(self.buckets, self.reshard_after_forward)
                self._kept.copied = self.comm.gather_lane.compute_done()
                self._release()
                return
        self._release()
        self._kept = None

    def begin_iteration(self) -> None:
        """Before a forward: what an earlier one has left, and no backward has freed, may be older than the parameters."""
        self._kept = None
        if has_replaced(self.parameters):
            self.rebuild()
        if self._is_left and self.reshard_after_backward and (torch.is_grad_enabled() or self.is_kept_by_default):
            self.reshard()

    def _release(self, *, lend: bool = False) -> None:
        """``lend``: gradients are reduced next, from the place of the parameters where they can lie there."""
        if self._gathering is not None:
            self.wait_for_unshard()
        if not self.is_unsharded:
            return
        assert self.comm is not None
        for parameter in self.parameters:
            parameter.register(parameter.sharded)
        self.is_unsharded = self._is_left = False
        if lend:
            if len(self.buckets) > 1:  # all lie in one block
                for bucket in self.buckets:
                    bucket.unreduced.save_from_overwriting()
            for bucket in self.buckets:
                bucket.unreduced.take_place_of_parameters()
        self.is_lent = lend and any(bucket.unreduced.in_place for bucket in self.buckets)
        if not self.is_lent:
            for bucket in self.buckets:
                bucket.unreduced.leave_place_of_parameters()
            self.comm.retire(self._whole_memory)

    # An iteration

    def before_forward(self) -> None:
        self.phase = Phase.FORWARD
        self.unshard()
        self.wait_for_unshard()

    def recompute(self, *, is_recorded: bool) -> None:
        """Activation checkpointing runs the forward anew inside of its backward. Not ``is_recorded``: the first forward was
        not (reentrant checkpointing), so that each call has a backward of its own."""
        self.unshard()
        self.wait_for_unshard()
        if not is_recorded:
            self._weights_are_needed = True

    def after_forward(self, *, recomputing: bool, is_watched: bool = True) -> None:
        """``recomputing``: this forward runs inside of a backward, which will free the parameters. Not ``is_watched``: a
        backward may need them without notice, so they stay."""
        if not recomputing:
            if is_watched:
                self.reshard()
            self._is_left = self.is_unsharded and (
                self.is_kept_by_default or not is_watched or not torch.is_grad_enabled()
            )
            if torch.is_grad_enabled():
                self._gradients_are_due = True
                assert self.comm is not None
                self._forward_places.append(len(self.comm.post_forward_order))
                self.comm.post_forward_order.append(self)
        self.phase = Phase.IDLE

    def before_backward(self, *, prefetch: bool) -> None:
        if self.phase is Phase.BACKWARD:
            return
        with profiled(f"vescale.fsdp::before_backward ({self.path})"):
            self.phase = Phase.BACKWARD
            self._gradients_are_due = True
            self._keeps_for_graph = torch.is_grad_enabled()
            self.unshard()
            self.wait_for_unshard()
            assert self.comm is not None
            self.comm.take_back_lent()
            if prefetch:
                self._needed_next = self._previous()
                if self.comm.gather_lane.is_stream:
                    self._prefetch_next()

    def _previous(self) -> ParameterGroup | None:
        """The group that ran before this one in forward, which backward needs next."""
        if not self._forward_places:
            return None
        assert self.comm is not None
        place = self._forward_places.pop()
        return self.comm.post_forward_order[place - 1] if 0 < place < len(self.comm.post_forward_order) else None

    def _prefetch_next(self) -> None:
        """Beside this group's backward where there are streams. On a CPU, whose cores would do both, when it is over: then
        the memory of this group's parameters and gradients is the next one's."""
        group, self._needed_next = self._needed_next, None
        if group is not None:
            group.prefetch(Phase.BACKWARD)

    def prefetch(self, phase: Phase) -> None:
        with self._in_phase(phase):
            self.unshard()

    @contextlib.contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def after_backward(self, *, is_last: bool) -> None:
        """The gradients of one forward call's inputs are there: this call needs the parameters no more. ``is_last``: nor
        does any other call in this backward."""
        if is_last:
            self._reduce()
        elif self._goes_after_backward:
            self.reshard()
        self.phase = Phase.REDUCED
        self._prefetch_next()

    def conclude_backward(self) -> None:
        """At the end of a backward: what no input's gradient has triggered."""
        if self._gradients_are_due or any(bucket.unreduced.has_any for bucket in self.buckets if self.reduce_gradients):
            self._reduce()
        elif self._goes_after_backward:
            self.reshard()
        self._weights_are_needed = False
        self._is_left = self._is_left or (self._keeps_for_graph and self.is_unsharded)
        self._keeps_for_graph = False
        self._needed_next = None
        self.phase = Phase.IDLE

    def reduce_accumulated(self) -> None:
        """Reduce, apart from a backward, what several without sync have left, also by hand (``torch.autograd.grad``, and its
        result added to ``grad`` of the unsharded parameters). All ranks do, whatever they have used."""
        self._receive_all()
        self._reduce()

    def _receive_all(self) -> None:
        for bucket in self.buckets:
            bucket.unreduced.receive_all()

    def forget_forward_order(self) -> None:
        self._forward_places.clear()

    def _reduce(self) -> None:
        """Reshard, and reduce what this and earlier backwards have left; every rank does, whatever it has used."""
        if self._goes_after_backward:
            self._release(lend=self.reduce_gradients)
            self._kept = None
        self._gradients_are_due = False
        if not self.reduce_gradients:
            self._receive_all()  # so that what was added by hand since the last backward adds up in the reduction's dtype
            return
        self.prepare()
        comm = self.comm
        assert comm is not None
        with profiled(f"vescale.fsdp::reduce ({self.path})"):
            reductions = [
                Reduction(bucket, self.options, comm.reduce_lane, comm.replica_lane, self.path)
                for bucket in self.buckets
                if bucket.requires_grad
            ]
            if reductions:
                comm.reduce(self, reductions)

    def finish_reductions(self, reductions: Sequence[Reduction]) -> None:
        assert self.comm is not None
        for reduction in reductions:
            key = id(reduction.bucket)
            if reduction.finish(self._carried.pop(key, None)):
                self.comm.finished.append(reduction)
            else:
                self._carried[key] = reduction

    def free_gradients(self, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            self._gradient_memory[id(reduction.bucket)].free()
        self.take_back(reductions)

    def take_back(self, reductions: Sequence[Reduction]) -> None:
        """The gathered memory that reductions read from, when they are done; it was allocated on the gather lane."""
        if self.is_lent:
            assert self.comm is not None
            for reduction in reductions:
                self.comm.gather_lane.wait_event(reduction.event)
            self._whole_memory.free()
            self.is_lent = False

    def abandon(self) -> None:
        """After an exception: forget this iteration, gradients included, and go to rest."""
        if self._gathering is not None:
            self.wait_for_unshard()
        self._carried.clear()
        self._forward_places.clear()
        self._needed_next = None
        self._gradients_are_due = self._weights_are_needed = self._keeps_for_graph = False
        self.phase = Phase.IDLE
        for bucket in self.buckets:
            bucket.unreduced.drop()
        self.reshard()
        self.take_back(())
        for bucket in self.buckets:
            if "_gradient_memory" in self.__dict__:
                self._gradient_memory[id(bucket)].free()

    def __repr__(self) -> str:
        return f"ParameterGroup({self.path!r}, {len(self.parameters)} parameters)"


def _nothing() -> None: ...
