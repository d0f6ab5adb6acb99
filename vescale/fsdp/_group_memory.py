"""``GroupMemory``: the gathered buffer of a group, and what is done with it by the contract of :class:`Residency`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.buffer import Allocation, PendingBuffer
from vescale.comm import group_of_ranks
from vescale.compat import backend_memory_pool, local_of, own_part, profiled, write_counts
from vescale.errors import FullyShardStateError, OrderMismatchError
from vescale.fsdp._context import CommContext, RootOrders
from vescale.fsdp._contract import HOLDINGS, TRANSITIONS, Event, Residency, ResidencyError
from vescale.fsdp._parameter import ManagedParameter
from vescale.fsdp._sharded_parameters import ShardedParameters
from vescale.gradients import GradientPlace, OrderedUnit, next_unit_number

_WITHOUT_PARAMETERS = (Residency.SHARDED, Residency.KEPT_PIECE)
_WITH_PARAMETERS = (Residency.GATHERED, Residency.UNSHARDED)


class GroupMemory:
    """Gathers, keeps and frees the parameters of a group; :attr:`residency` changes in :meth:`_move` only.

    Args:
        at_rest: the parameters and their shards.
        reduce_op: of the gradients, ``avg`` or ``sum``.
        begin_gradients: called before the first gradient of a bucket; returns where gradients go.

    Attributes:
        gathered: memory of the gathered buffer; None until the first gather.
        on_write: called with the name of a parameter that was written to while it was gathered, and a digest of its value.
        is_held: the caller of unshard() has the unsharded parameters registered, until they are resharded.
        serves_next_forward: what is kept at the end of a forward is for a backward that will free it, and for forwards that
            come before that; else the next iteration gathers anew.
        has_unknown_work: a collective is being started in this memory; after an interrupt it may run unknown to anybody.
        custom_all_gather: see :meth:`FSDPModule.set_custom_all_gather`.
        number: of the group, among those that communicate along the same axes.
    """

    def __init__(
        self, at_rest: ShardedParameters, reduce_op: str, begin_gradients: Callable[[], GradientPlace]
    ) -> None:
        self.at_rest = at_rest
        self.custom_all_gather: Any = None
        self.residency = Residency.SHARDED
        self.gathered: Allocation | None = None
        self.serves_next_forward = False
        self.is_held = False
        self.has_unknown_work = False
        self._versions: list[int] = []  # of the sharded parameters, when they were gathered last
        self._changed: list[ManagedParameter] = []  # between the last two gathers
        self._data_views: list[tuple[int, torch.Tensor]] = []  # of the unsharded parameters, since they were registered
        self._marks: list[tuple[int, int]] = []  # of the unsharded parameters, when they were registered
        self._shared_gradients: list[tuple[ManagedParameter, torch.Tensor | None]] = []
        self.on_write: Callable[[str, str], None] = lambda name, value: None
        self._reduce_op, self._begin_gradients = reduce_op, begin_gradients
        self._pool: Any = None
        self._pending: list[PendingBuffer] = []
        self._event: object = None  # after the gathers, or the copies of pieces
        self._unit: OrderedUnit | None = None
        self._orders = RootOrders()
        self.number = next_unit_number(at_rest.axes)

    @cached_property
    def comm(self) -> CommContext:
        """Streams, and what is in flight on them; the root of a model sets one for all its groups."""
        return CommContext(self.at_rest.device)

    def belong_to(self, comm: CommContext, orders: RootOrders) -> None:
        """Of a root, which enrolls its groups in the same order on every rank."""
        self.comm, self._orders, self._unit = comm, orders, None

    @property
    def unit(self) -> OrderedUnit:
        """This group in the order of collectives."""
        if self._unit is None:
            order = self._orders.along(self.at_rest.axes)
            self._unit = order.enroll(self.number, lambda: self.at_rest.path, len(self.at_rest.parameters))
        return self._unit

    def compare_gathers(self) -> None:
        """Before a reduction, see :meth:`CollectiveOrder.compare_gathers`."""
        self._orders.compare_gathers(will_reduce=True)

    def _move(self, event: Event) -> None:
        found = TRANSITIONS.get((self.residency, event))
        if found is None:
            raise ResidencyError(f"group {self.at_rest.path!r}", self.residency, event, TRANSITIONS)
        self.residency = found[0]

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return HOLDINGS[self.residency].registered

    @property
    def is_gathered(self) -> bool:
        """Whether whole parameters are there, registered or not."""
        return self.residency in _WITH_PARAMETERS

    @property
    def is_borrowed(self) -> bool:
        return self.residency is Residency.BORROWED

    @property
    def kept_bytes(self) -> int:
        """Of the pieces that are kept for backward, with a number for ``reshard_after_forward``."""
        return sum(bucket.gathering.kept_bytes for bucket in self.at_rest.buckets if self.gathered is not None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` is that of gathered parameters."""
        local = own_part(tensor)
        is_plain = type(local) in (torch.Tensor, nn.Parameter)
        return is_plain and self.gathered is not None and self.gathered.contains(local)

    def is_among(self, addresses: Collection[int]) -> bool:
        """Whether gathered parameters are at one of these addresses of memory."""
        return self.gathered is not None and self.gathered.is_among(addresses)

    def prepare(self) -> Allocation:
        """Before the first gather: the buffers of the running group. Returns the memory that is gathered to.

        Raises RuntimeError for parameters on the meta device, or elsewhere than where the group computes.
        """
        if self.gathered is not None:
            return self.gathered
        on_meta = [p.name for p in self.at_rest.parameters if p.sharded.is_meta]
        if on_meta:
            raise FullyShardStateError(
                f"parameters {', '.join(on_meta[:5])} of {self.at_rest.path or 'the root'} are on the meta device; "
                "materialize them before the first forward: model.to_empty(device=...), then initialize or load a state dict"
            )
        device, offloads = self.at_rest.device, self.at_rest.offloads
        gathered = Allocation(device, pool=self._pool, access_error=_freed_text(self.at_rest.path))
        for bucket in self.at_rest.buckets:
            if bucket.shards.device.type != ("cpu" if offloads else device.type):
                raise FullyShardStateError(
                    f"parameters of {self.at_rest.path or 'the root'} are on {bucket.shards.device}, and the group computes "
                    f"on {device}{' with offload to cpu' if offloads else ''}; move the model with to_empty() or to(), or "
                    "load a state dict from that device"
                )
            bucket.prepare(device, gathered, self._pool, self._reduce_op, self._begin_gradients)
        self.gathered = gathered
        return gathered

    # Gather

    def unshard(self) -> None:
        """Start the all-gathers; nothing happens when they are running, or done. After an error nothing is gathered."""
        if self.is_borrowed:
            self.comm.take_back_borrowed()
        if self.residency not in _WITHOUT_PARAMETERS:
            return
        comm, path = self.comm, self.at_rest.path
        if self.at_rest.is_stale:
            self.at_rest.rebuild(self.forget_buffers)
            comm.gather_stream.wait_for_compute()  # which may have copied parameters to their places
        memory = self.prepare()
        with profiled(f"vescale.fsdp::all_gather ({path})"):
            self._note_versions()
            if self.residency is Residency.KEPT_PIECE:
                comm.gather_stream.wait_event(self._event)
            has_memory = False
            try:
                with comm.gather_stream(), torch.no_grad():
                    comm.make_room(memory)
                    memory.allocate()
                    has_memory = True
                    self._start_gathers(path)
            except BaseException as error:
                if has_memory:  # no longer on the gather stream, which the computation waits for
                    self._drop_gathers(error)
                raise
            self._move(Event.GATHER)
            self.has_unknown_work = False

    def _start_gathers(self, path: str) -> None:
        stream, self.has_unknown_work = self.comm.gather_stream, True
        self.unit.gathers()
        for bucket in self.at_rest.buckets:
            self._pending.append(bucket.gathering.start(self.unit, path, self.custom_all_gather))
            if stream.is_real and self.at_rest.offloads:
                self.comm.note_host_read()
        if stream.is_real:
            for pending in self._pending:
                pending.wait()
            self._event = stream.done()

    def _drop_gathers(self, error: BaseException) -> None:
        """An ``error`` has ended the start of the all-gathers: wait for those that were started, and free the memory."""
        assert self.gathered is not None
        started, self._pending = self._pending, []
        self.comm.gather_stream.compute_waits(self.comm.gather_stream.done())
        if not isinstance(error, OrderMismatchError):  # else the ranks that raise do not take part in what follows
            for pending in started:
                try:
                    pending.wait()
                except Exception as second:
                    error.add_note(f"A running all-gather failed, too: {type(second).__name__}: {second}")
        self._drop_memory()

    def _drop_memory(self) -> None:
        """Work that nothing knows of may still write to the memory of this group: it goes with the last reference, which
        that work has, and the next gather allocates other memory. Graphs that have saved parameters fail."""
        unsharded = [p.unsharded for p in self.at_rest.parameters if p.unsharded is not None]
        torch.autograd.graph.increment_version([each for t in unsharded for each in (t, own_part(t))])
        for parameter in self.at_rest.parameters:
            parameter.unsharded = None
        if self.gathered is not None:
            self.comm.forget(self.gathered)
        self.gathered = None
        self._versions, self._changed, self.has_unknown_work = [], [], False

    def _note_versions(self) -> None:
        """Parameters may have been written since the last gather."""
        before, self._versions = self._versions, self._present_versions()
        if before != self._versions:
            self._changed += [p for p, old, new in zip(self.at_rest.parameters, before, self._versions) if old != new]

    def _present_versions(self) -> list[int]:
        return write_counts([p.sharded for p in self.at_rest.parameters])  # type: ignore[misc]  # they are DTensors

    def _present_marks(self) -> list[tuple[int, int]]:
        found = [p.unsharded for p in self.at_rest.parameters]
        marks = [(t._version, t.data_ptr()) if type(t) is nn.Parameter else _mark(t) for t in found]
        if self._data_views:
            written = Counter(of for of, view in self._data_views if view._version)
            marks = [(version + written[id(t)], place) for t, (version, place) in zip(found, marks, strict=True)]
        return marks

    @property
    def is_current(self) -> bool:
        """Whether whole parameters are there, and the sharded ones have not been written to since."""
        return self.is_gathered and not self.at_rest.is_stale and self._versions == self._present_versions()

    def refuse_unseen_writes(self) -> None:
        """At the end of a forward: raises FullyShardStateError where the sharded form of a registered parameter was written
        to, as an optimizer does, which holds it: the forward has read the values of before."""
        now = self._present_versions() if self.is_unsharded else self._versions
        for parameter, old, new in zip(self.at_rest.parameters, self._versions, now):
            if old != new:
                raise FullyShardStateError(
                    f"parameter {parameter.name!r} of shape {parameter.global_shape} was written to inside of the forward "
                    "that uses it, by way of the sharded parameter that the program holds (optimizer.step(), a list of "
                    "parameters), so that the forward has read the values of before. Expected the write before or after "
                    "the forward, or to what is registered there (module.weight)"
                )

    def reshard_if_changed(self) -> None:
        """What is kept is older than the sharded parameters: it is gathered anew."""
        if self.residency is Residency.GATHERED and not self.is_current:
            self.reshard()

    def wait(self) -> None:
        """The gathered parameters are there for the current stream, and registered."""
        self._arrive()
        if self.residency is not Residency.GATHERED:
            return
        for bucket in self.at_rest.buckets:
            for index, parameter in enumerate(bucket.parameters):
                unsharded, sharded = parameter.unsharded, parameter.sharded
                if unsharded is None or unsharded.requires_grad != sharded.requires_grad:  # frozen or thawed in between
                    parameter.requires_grad = sharded.requires_grad
                    bucket.make_unsharded(index, self._data_views)
                assert parameter.unsharded is not None
                parameter.register(parameter.unsharded)
            bucket.requires_grad = any(p.requires_grad for p in bucket.parameters)
            bucket.unreduced.restore_versions()
        if self._changed:
            # A graph that has saved what was there before is as invalid as where an optimizer wrote to the parameter itself.
            tensors = [p.unsharded for p in self._changed if p.unsharded is not None]
            torch.autograd.graph.increment_version(
                [each for t in tensors for each in {id(t): t, id(own_part(t)): own_part(t)}.values()]
            )
            self._changed = []
        self._marks = self._present_marks()
        assert self.gathered is not None
        self.gathered.lend(self.comm.gather_stream.wait_event)
        self._move(Event.USE)

    def _arrive(self) -> None:
        """The all-gathers that run are done, for the current stream."""
        if self.residency is not Residency.GATHERING:
            return
        if self.comm.gather_stream.is_real:
            self.comm.gather_stream.compute_waits(self._event)
        else:
            try:
                for pending in self._pending:
                    pending.wait()
            except OrderMismatchError:
                # The ranks that raise do not take part in what follows, and a gather of which some wait may still arrive.
                self._pending, self.has_unknown_work = [], True
                raise
        self._pending = []
        for bucket in self.at_rest.buckets:
            bucket.gathering.drop_piece()
        self._move(Event.ARRIVE)

    def share_gradients(self) -> None:
        """In a forward: the registered parameters show the gradients of the sharded ones, until these are registered, or a
        backward begins inside of it."""
        if self.is_unsharded and not self._shared_gradients:
            for parameter in self.at_rest.parameters:
                if parameter.unsharded is not None and parameter.unsharded.grad is None:  # else of a split backward
                    self._shared_gradients.append((parameter, parameter.share_gradient()))

    def take_gradients(self) -> None:
        """They show them no more."""
        shared, self._shared_gradients = self._shared_gradients, []
        for parameter, gradient in shared:
            parameter.take_gradient(gradient)

    # Free

    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones, and what was kept of them."""
        self._release(Event.RESHARD)

    def keep_piece(self, num_ranks: int) -> None:
        """Reshard, but let every rank keep one of ``num_ranks`` pieces, so that this number of consecutive ranks of the
        shard axis holds all, and backward gathers from them alone: from the ranks of one machine, when it is the number of
        its devices. Makes a process group of them on first use."""
        axes = self.at_rest.axes
        ranks = dist.get_process_group_ranks(axes.shard_group)
        first = ranks.index(dist.get_rank()) // num_ranks * num_ranks
        neighbours = group_of_ranks(tuple(ranks[first : first + num_ranks]))
        for bucket in self.at_rest.buckets:
            bucket.gathering.keep_piece(neighbours)
        self._event = self.comm.gather_stream.compute_done()
        self._release(Event.KEEP_PIECE)

    def leave(self) -> None:
        """A forward or backward has ended: register the sharded parameters; memory stays."""
        if self.is_unsharded and not self.is_held:
            self._register_sharded()
            self._move(Event.LEAVE)

    def _register_sharded(self) -> None:
        """What has been written to the unsharded parameters since they were registered is written to the sharded ones."""
        self.take_gradients()
        if self._marks != self._present_marks():
            before, now = (dict(zip(map(id, self.at_rest.parameters), m)) for m in (self._marks, self._present_marks()))
            for bucket in self.at_rest.buckets:
                for index, parameter in enumerate(bucket.parameters):
                    if before[id(parameter)] != now[id(parameter)] and not bucket.unreduced.has_overwritten:
                        self.on_write(parameter.name, bucket.write_back(index, self.at_rest.path))
        self._data_views.clear()
        for parameter in self.at_rest.parameters:
            parameter.register(parameter.sharded)

    def reshard_for_reduction(self) -> None:
        """Reshard; gradients take the place of the parameters, if some can, and are reduced from there."""
        self._release(Event.BORROW)

    def _release(self, event: Event) -> None:
        """``event``: why the parameters go. ``BORROW``: gradients are reduced next, from the place of the parameters where
        they can be there; where none can, the group is resharded."""
        self._arrive()
        self.is_held = False
        was_gathered = self.is_gathered
        if self.is_unsharded:
            self._register_sharded()
        if was_gathered:
            if event is Event.BORROW and not self._put_gradients_in_place():
                event = Event.RESHARD
            if event is not Event.BORROW:
                assert self.gathered is not None
                for bucket in self.at_rest.buckets:
                    bucket.unreduced.leave_place_of_parameters()
                self.comm.leave(self.gathered)
        elif self.residency is Residency.KEPT_PIECE:
            for bucket in self.at_rest.buckets:
                bucket.gathering.drop_piece()
        self._move(event if was_gathered else Event.RESHARD)

    def _put_gradients_in_place(self) -> bool:
        """Whether some are there."""
        if len(self.at_rest.buckets) > 1:  # all are in one block of memory
            for bucket in self.at_rest.buckets:
                bucket.unreduced.save_from_overwriting()
        for bucket in self.at_rest.buckets:
            bucket.unreduced.take_place_of_parameters()
        return any(bucket.unreduced.in_place for bucket in self.at_rest.buckets)

    def give_back(self, *events: Any) -> None:
        """The gathered memory that reductions read from; ``events`` are after them."""
        if self.is_borrowed:
            assert self.gathered is not None
            self.gathered.give_back(*events)
            self.gathered.free()
            self._move(Event.GIVE_BACK)

    def abandon(self) -> None:
        """An exception has interrupted this group anywhere, also inside of a transition: wait for what runs, register the
        sharded parameters, and free the gathered ones. No reduction is running."""
        pending, self._pending = self._pending, []
        if self.is_unsharded:
            self._register_sharded()
        for parameter in self.at_rest.parameters:
            parameter.to_rest()
        for one in pending:
            one.wait()
        self.comm.gather_stream.compute_waits(self.comm.gather_stream.done())  # the program may write to the shards now
        self.is_held = False
        if self.gathered is not None:
            for bucket in self.at_rest.buckets:
                bucket.unreduced.leave_place_of_parameters()
                bucket.gathering.drop_piece()
            self.comm.forget(self.gathered)
            self.gathered.lend(self.comm.gather_stream.wait_event)
            self.gathered.give_back(self.comm.gather_stream.compute_done(), self._event)
            if self.has_unknown_work:
                self._drop_memory()
            else:
                self.gathered.free()
        self._move(Event.ABANDON)

    def use_backend_memory(self, enable: bool) -> None:
        """Allocate communication buffers from the process group's own memory, where its backend has such."""
        group = self.at_rest.axes.shard_group
        self._pool = backend_memory_pool(group, self.at_rest.device) if enable else None
        self.forget_buffers()
        for parameter in self.at_rest.parameters:
            parameter.unsharded = None

    def copy_settings(self, other: GroupMemory) -> None:
        self._pool, self.custom_all_gather = other._pool, other.custom_all_gather

    def forget_buffers(self) -> None:
        """Reshard, and plan the buffers anew before the next gather."""
        self.reshard()
        self.gathered = None
        self._versions, self._changed = [], []


def _freed_text(path: str) -> str:
    """Of tensors over memory that a group has gathered parameters to, in the time in which it has none."""
    return (
        f"this tensor shares memory with a parameter of {path or 'the root'} that was gathered for a forward or "
        "backward, and that memory has since been freed. Expected a copy, made where the tensor was obtained "
        "(weight.detach().clone()), or the registered parameter, read where the value is needed; where a backward reads "
        "it that begins at a tensor which the forward has kept elsewhere (an auxiliary loss in a list of the program), "
        "return that tensor from the module's forward, or set reshard_after_forward=False for its unit"
    )


def _mark(tensor: nn.Parameter | None) -> tuple[int, int]:
    """Changes when a tensor is written to, or gets other data."""
    if not isinstance(tensor, DTensor):
        return (0, 0) if tensor is None else (tensor._version, 0)
    local = local_of(tensor)
    return tensor._version + local._version, local.data_ptr() if type(local) is torch.Tensor else 0
