"""``ParameterGroup``: parameters that are gathered and reduced together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Partial

from vescale.buffer import COLLECTIVE_ALIGNMENT_BYTES
from vescale.comm import all_reduce_
from vescale.compat import make_dtensor, make_spec, profiled
from vescale.compat.model_hooks import ASKED_GRADIENTS, AskedGradients
from vescale.errors import UnsupportedParameterError
from vescale.fsdp._bucket import Bucket
from vescale.fsdp._calls import see_graphs
from vescale.fsdp._contract import GROUP, Move, Residency, ResidencyError, Turn
from vescale.fsdp._group_memory import GroupMemory
from vescale.fsdp._parameter import ManagedParameter, managed_by
from vescale.fsdp._registered import has_replaced, refuse_transforms
from vescale.fsdp._sharded_parameters import GroupMember, ShardedParameters
from vescale.gradients import DataParallelAxes, GradientPlace, ReductionOptions, ShardedReduction
from vescale.placements import contiguous_stride, redistribute

BlockPolicy = Callable[[str, nn.Parameter], int | None]


@dataclass
class _BackwardState:
    """What a group knows about the backward that runs.

    Attributes:
        builds_graph: ``create_graph``: its ops read the parameters later.
        reads_weights_late: reentrant checkpointing, in which each call has a backward of its own.
        prefetch_next: starts to gather the group that backward needs next.
    """

    builds_graph: bool = False
    reads_weights_late: bool = False
    prefetch_next: Callable[[], None] | None = None


class ParameterGroup:
    """Parameters that are gathered and reduced together, over given mesh axes; it knows nothing of modules' hooks.

    What it has in memory follows the contract of :class:`Residency`:

    ===================  ==========================================  ================================================
    moment               residency                                   gradients
    ===================  ==========================================  ================================================
    at rest              sharded                                     sharded ``.grad``
    forward              gathering, unsharded                        -
    forward to backward  by ``reshard_after_forward``: sharded       -
                         (True), gathered (False), kept piece (a
                         number)
    backward             gathering, unsharded                        autograd's; at its end in the gathered buffer
    reduction            borrowed (or sharded)                       reduce-scattered, added to ``.grad``
    ===================  ==========================================  ================================================

    Args:
        members: the parameters, in an order that is the same on every rank.
        axes: the mesh axes to shard and replicate over.
        reshard_after_forward: True, False, or the number of ranks to reshard to.
        mp_policy, offload_policy: PyTorch's.
        reduce_op: ``avg`` (every rank has its own loss) or ``sum`` (gradients are contributions to one loss).
        alignment_bytes: of shards and tensors.
        path: of the module, for messages and profiles.

    Attributes:
        is_kept_by_default: ``reshard_after_forward`` is False because the group is the root's, not because the user set it.
        stays_gathered: forwards without gradients do not reshard it, either.
        is_read_by_graph: a backward with ``create_graph`` has saved parameters: they stay until the end of one at which its
            graph is gone, or released.
        is_watched: whether a backward of the last forward announces itself before it needs the parameters.
        on_gradients: called when the first gradient of a backward is there, to arrange for the backward's end.
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
        self.at_rest = ShardedParameters(
            members,
            axes,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
            alignment_bytes=alignment_bytes,
            path=path,
        )
        self.axes, self.device = axes, axes.device
        self.reshard_after_forward = reshard_after_forward
        self.is_kept_by_default = False
        self.stays_gathered = False
        self.is_watched = True
        self.is_read_by_graph = False
        self.reshard_after_backward = True
        self.reduce_gradients = True
        self.unshard_in_backward = True
        self.options = ReductionOptions(op=reduce_op)
        for parameter in self.at_rest.parameters:
            parameter.reduce_op = reduce_op
        self._set_idle()

    def _set_idle(self) -> None:
        self.memory = GroupMemory(self.at_rest, self.options.op, self._begin_gradients)
        self.on_gradients: Callable[[], None] = _nothing
        self.turn = Turn.REST
        self._backward = _BackwardState()
        self.forward_places: list[int] = []

    def _move(self, event: Move) -> None:
        found = GROUP.get((self.turn, event))
        if found is None:
            raise ResidencyError(f"group {self.path!r}", self.turn, event, GROUP)
        self.turn = found

    # At rest

    @property
    def parameters(self) -> list[ManagedParameter]:
        return self.at_rest.parameters

    @property
    def buckets(self) -> list[Bucket]:
        return self.at_rest.buckets

    @property
    def path(self) -> str:
        """Of the module; for messages and profiles."""
        return self.at_rest.path

    @path.setter
    def path(self, path: str) -> None:
        self.at_rest.path = path

    def rebuild(self) -> None:
        """See :meth:`ShardedParameters.rebuild`."""
        self.at_rest.rebuild(self.memory.forget_buffers)

    def copy(self) -> ParameterGroup:
        """A group at rest with the same values in memory of its own. Its sharded parameters are not registered yet: the
        caller registers them, and sets their slots, in copies of the modules."""
        self.reshard()
        if self.at_rest.is_stale:
            self.rebuild()
        twin = copy.copy(self)
        twin.options = dataclasses.replace(self.options)
        twin.at_rest = self.at_rest.copy()
        twin._set_idle()
        twin.memory.copy_settings(self.memory)
        return twin

    def _begin_gradients(self) -> GradientPlace:
        """Make room for a bucket's gradients, and decide where they go. They take the place of parameters that will be
        resharded when they are reduced, so that the two need memory once; before that only with ``in_place``, because other
        code may still read the parameters."""
        self.memory.take_gradients()
        self.on_gradients()
        self.memory.comm.make_room_for_gradients(self.memory)
        if not (self.is_gathered and self._goes_after_backward and self.reduce_gradients):
            return GradientPlace.APART
        at_once = self.options.in_place and not self._backward.reads_weights_late
        return GradientPlace.IN_PLACE if at_once else GradientPlace.HELD

    # Unshard and reshard

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self.memory.is_unsharded

    @property
    def is_gathered(self) -> bool:
        """Whether whole parameters are there, registered or not."""
        return self.memory.is_gathered

    def unshard(self) -> None:
        """Start the all-gathers; nothing happens when they are running, or done."""
        self.memory.unshard()

    def wait_for_unshard(self) -> None:
        """The gathered parameters are there for the current stream, and registered."""
        self.memory.wait()

    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones, and what was kept of them."""
        self.memory.reshard()

    def reshard_in_forward(self) -> None:
        """Reshard according to ``reshard_after_forward``, but keep nothing if no backward can follow."""
        backward_comes = torch.is_grad_enabled()
        if self.is_read_by_graph or (self.stays_gathered and not backward_comes):
            return
        if self.reshard_after_forward is False and (backward_comes or not self.is_kept_by_default):
            return
        if self.reshard_after_forward not in (True, False) and backward_comes and self.is_unsharded:
            self.memory.keep_piece(self.reshard_after_forward)
        else:
            self.reshard()

    # An iteration

    def begin_iteration(self) -> None:
        """Before a forward: what an earlier one has left, and no backward has freed, may be older than the parameters."""
        if self.memory.residency is Residency.KEPT_PIECE:
            self.reshard()
        if has_replaced(self.at_rest.parameters):
            self.rebuild()
        if self.memory.residency is not Residency.GATHERED:
            return
        is_left = self.reshard_after_backward and (torch.is_grad_enabled() or self.is_kept_by_default)
        if is_left and not self.memory.serves_next_forward and not self.is_read_by_graph:
            self.reshard()
        else:
            self.memory.reshard_if_changed()

    def before_forward(self) -> None:
        refuse_transforms(self.path)
        self.memory.reshard_if_changed()
        self.memory.unshard()
        self.memory.wait()
        self.memory.share_gradients()

    def recompute(self, *, is_recorded: bool) -> None:
        """Activation checkpointing runs the forward anew inside of its backward. Not ``is_recorded``: the first forward was
        not (reentrant checkpointing), so that each call has a backward of its own."""
        refuse_transforms(self.path)
        self.memory.unshard()
        self.memory.wait()
        if not is_recorded:
            self._backward.reads_weights_late = True

    def after_forward(self, *, recomputing: bool, is_watched: bool = True) -> None:
        """The sharded parameters are registered. ``recomputing``: this forward runs inside of a backward, whose end does
        that. Not ``is_watched``: a backward may need the parameters without notice, so they stay gathered."""
        if recomputing:
            return
        self.memory.refuse_unseen_writes()
        if is_watched:
            self.reshard_in_forward()
        self.memory.leave()
        self.is_watched = is_watched
        self.memory.serves_next_forward = is_watched and torch.is_grad_enabled() and not self.is_kept_by_default
        if torch.is_grad_enabled():
            self._move(Move.FORWARD)
            self.forward_places.append(len(self.memory.comm.prefetches))
            self.memory.comm.prefetches.append(self.prefetch_for_backward)

    def prefetch_for_backward(self) -> None:
        if self.unshard_in_backward:
            self.memory.unshard()

    def before_backward(self, *, prefetch: bool) -> None:
        if self.turn is Turn.RUNNING:
            return
        with profiled(f"vescale.fsdp::before_backward ({self.at_rest.path})"):
            self._move(Move.BACKWARD)
            self.memory.take_gradients()
            for bucket in self.at_rest.buckets:
                bucket.gradients.drop_cleared()
            self._backward.builds_graph = torch.is_grad_enabled()
            self.prefetch_for_backward()
            self.memory.wait()
            self.memory.comm.take_back_borrowed()
            if prefetch:
                self._backward.prefetch_next = self._previous()
                if self.memory.comm.gather_stream.is_real:
                    self._prefetch_next()

    def _previous(self) -> Callable[[], None] | None:
        """Gathers the group that ran before this one in forward, which backward needs next."""
        if not self.forward_places:
            return None
        place = self.forward_places.pop()
        return self.memory.comm.prefetches[place - 1] if 0 < place < len(self.memory.comm.prefetches) else None

    def _prefetch_next(self) -> None:
        """Beside this group's backward where there are streams. On a CPU, whose cores would do both, when it is over: then
        the memory of this group's parameters and gradients is the next one's."""
        prefetch, self._backward.prefetch_next = self._backward.prefetch_next, None
        if prefetch is not None:
            prefetch()

    @property
    def _goes_after_backward(self) -> bool:
        return self.reshard_after_backward and not self._backward.builds_graph and not self.is_read_by_graph

    def after_backward(self, *, is_last: bool) -> None:
        """The gradients of one forward call's inputs are there: this call needs the parameters no more. ``is_last``: nor
        does any other call in this backward."""
        if is_last:
            self._reduce()
        else:
            if self._goes_after_backward:
                self.reshard()
            self._move(Move.PAUSE)
        self._prefetch_next()

    def conclude_backward(self, *, is_last: bool, read_later: Collection[int]) -> None:
        """At the end of a backward: what no input's gradient has triggered. ``is_last``: no more come in this iteration.
        ``read_later``: addresses of what graphs of gradients hold."""
        is_left = self.is_read_by_graph and self.memory.is_among(read_later)
        self.is_read_by_graph = self._backward.builds_graph or is_left
        if self.turn in (Turn.DUE, Turn.RUNNING) or any(
            bucket.unreduced.has_any for bucket in self.at_rest.buckets if self.reduce_gradients
        ):
            self._reduce()
        elif self._goes_after_backward:
            self.reshard()
        self.memory.leave()
        if not self.reduce_gradients and not self.stays_gathered:
            for bucket in self.at_rest.buckets:
                bucket.gradients.show_unreduced()
        self._backward = _BackwardState()
        self._move(Move.CONCLUDE)
        if is_last:
            self.forward_places.clear()

    # Gradients

    def reduce_accumulated(self) -> None:
        """Reduce, apart from a backward, what several without sync have left, also by hand (``torch.autograd.grad``, and its
        result added to ``grad`` of the unsharded parameters). All ranks do, whatever they have used."""
        self._receive_all()
        self._reduce()

    def _receive_all(self) -> None:
        for bucket in self.at_rest.buckets:
            bucket.gradients.drop_cleared()
            bucket.unreduced.receive_all()

    def _reduce(self) -> None:
        """Reshard, and reduce what this and earlier backwards have left; every rank does, whatever it has used."""
        if self._goes_after_backward:
            if self.reduce_gradients and any(bucket.requires_grad for bucket in self.at_rest.buckets):
                self.memory.reshard_for_reduction()
            else:
                self.reshard()
        self._move(Move.REDUCE)
        if not self.reduce_gradients:
            self._receive_all()  # so that what was added by hand since the last backward adds up in the reduction's dtype
            return
        self.memory.prepare()
        comm = self.memory.comm
        with profiled(f"vescale.fsdp::reduce ({self.at_rest.path})"):
            unit, reductions = self.memory.unit, []
            first_flag = unit.first_flag
            for bucket in self.at_rest.buckets:
                if bucket.requires_grad:
                    reductions.append(
                        ShardedReduction(
                            bucket.gradients,
                            self.options,
                            comm.reduce_stream,
                            comm.replica_stream,
                            self.path,
                            unit,
                            first_flag,
                        )
                    )
                first_flag += len(bucket.parameters)
            if reductions:
                num_bytes = sum(reduction.gradients.unreduced.buffer.num_bytes for reduction in reductions)
                unit.reduces(self.options.all_reduce, num_bytes)
                comm.reduce(self.memory, reductions)

    def abandon(self) -> None:
        """After an exception: forget this iteration, gradients included, and go to rest."""
        self.forward_places.clear()
        self.is_read_by_graph = False
        self._backward = _BackwardState()
        self._move(Move.CONCLUDE)
        for bucket in self.at_rest.buckets:
            bucket.gradients.abandon(frees=not self.memory.has_unknown_work)
        self.memory.abandon()

    def abandon_forward(self) -> None:
        """After an exception in a forward: go to rest. Gradients that earlier backwards have left, and reductions that run,
        stay."""
        self.forward_places.clear()
        if not self.memory.is_borrowed:
            self.memory.abandon()

    def __repr__(self) -> str:
        return f"ParameterGroup({self.path!r}, {len(self.parameters)} parameters)"


def _nothing() -> None: ...


# Gradients that programs ask for by parameter: ``torch.autograd.grad(loss, p)`` and ``backward(inputs=[p])``. Graphs
# hold the gathered form of a parameter that a group shards, and programs name the registered, sharded one.


def _leaves(inputs: Sequence[Any], *, returns_graph: bool) -> list[Any] | None:
    """What a graph has in the place of ``inputs``; None where it has these.

    Raises UnsupportedParameterError where gradients with a graph are asked for.
    """
    found = [managed_by(each) for each in inputs]
    asked = next((managed for managed in found if managed is not None), None)
    if asked is None:
        return None
    if returns_graph:
        raise UnsupportedParameterError(
            f"torch.autograd.grad(..., create_graph=True) of parameter {asked.name!r} of shape {asked.global_shape}, "
            "which fully_shard or a unit of a plan gathers: the reduction over ranks is not part of the graph. "
            "Expected gradients of inputs and activations, create_graph=False, or a plan that replicates this "
            "parameter (no entry with phase=INIT)"
        )
    return [
        each if managed is None or managed.unsharded is None else managed.unsharded
        for each, managed in zip(inputs, found, strict=True)
    ]


def _answers(inputs: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``inputs``, each placed as the parameter, from those of this rank. All ranks ask for the same ones:
    one reduction for each, and for each group of data-parallel ranks one of which ones any rank has."""
    asked = [(index, managed) for index, each in enumerate(inputs) if (managed := managed_by(each)) is not None]
    answers = list(gradients)
    for group in dict.fromkeys(managed.axes.data_parallel.group for _, managed in asked):
        own = [(index, managed) for index, managed in asked if managed.axes.data_parallel.group is group]
        has = [gradients[index] is not None for index, _ in own]
        flags = torch.tensor(has, dtype=torch.uint8, device=own[0][1].axes.device)
        flags = all_reduce_(flags, "max", group, requester="which gradients exist on any rank").wait()
        with torch.no_grad():
            for (index, managed), any_has in zip(own, flags.tolist(), strict=True):
                answers[index] = _reduced(managed, gradients[index]) if any_has else None
    return tuple(answers)


def _reduced(managed: ManagedParameter, gradient: torch.Tensor | None) -> torch.Tensor:
    assert managed.unsharded is not None
    of_one_loss, axes, local = managed.reduce_op == "sum", managed.axes, None
    if gradient is not None:
        contribution = copy.copy(managed.contribution)
        contribution.leaves_pending = False
        local = contribution.of(gradient, None, of_one_loss=of_one_loss)
    if local is None:
        local = torch.zeros(managed.shape, dtype=managed.unsharded.dtype, device=axes.device)
    if not of_one_loss:
        local = local / (axes.shard_size * axes.num_replicas)
    spec = managed.sharded_spec(Partial(), local.dtype)
    placements = [Partial() if axis in axes.replicate else p for axis, p in enumerate(spec.placements)]
    shape = managed.global_shape
    whole = make_spec(spec.mesh, placements, shape, contiguous_stride(shape), local.dtype)
    own = managed.sharded_placements
    return redistribute(make_dtensor(local.contiguous(), whole), spec.mesh, own).to(managed.sharded.dtype)


ASKED_GRADIENTS.append(AskedGradients(_leaves, _answers, see_graphs))
