"""``CommContext``: the streams of several groups, and the memory in flight on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.buffer import Allocation
from vescale.comm import SideStream
from vescale.errors import OrderMismatchError
from vescale.gradients import CollectiveOrder, DataParallelAxes, ShardedReduction


class RootOrders:
    """What the groups of one root have gathered and reduced, along each group of data-parallel ranks. Roots that share a
    :class:`CommContext` have one each: that their collectives meet is found before their data are used."""

    def __init__(self) -> None:
        self._orders: dict[dist.ProcessGroup, CollectiveOrder] = {}

    def along(self, axes: DataParallelAxes) -> CollectiveOrder:
        group = axes.data_parallel.group
        found = self._orders.get(group)
        if found is None:
            found = self._orders[group] = CollectiveOrder(axes)
        return found

    def begin(self, model: str) -> None:
        """See :meth:`CollectiveOrder.begin`."""
        for order in self._orders.values():
            order.begin(model)

    def end_turns(self) -> None:
        """See :meth:`CollectiveOrder.end_turn`."""
        for order in self._orders.values():
            order.end_turn()

    def note_trained(self, text: str) -> None:
        """Which parameters are trained has changed; the ranks compare it with their reductions."""
        for order in self._orders.values():
            order.trained = text

    def compare_gathers(self, *, will_reduce: bool) -> None:
        """See :meth:`CollectiveOrder.compare_gathers`; raises when all groups have compared."""
        error: OrderMismatchError | None = None
        for order in self._orders.values():
            try:
                order.compare_gathers(will_reduce=will_reduce)
            except OrderMismatchError as found:
                error = found
        if error is not None:
            raise error


class Lender(Protocol):
    """A group whose gradients are being reduced, maybe from the memory of its parameters."""

    @property
    def is_borrowed(self) -> bool: ...

    def give_back(self, *events: Any) -> None: ...

    def compare_gathers(self) -> None: ...

    has_unknown_work: bool


class CommContext:
    """Streams, and memory that they may still be using. Roots that run in turns may share one (``share_comm_ctx``).

    =====================  ==============================  ===========================================================
    memory                 allocated on, used by           freed
    =====================  ==============================  ===========================================================
    gathered               gather stream; computation      CPU: at reshard. Device: when the gather after the next one
                                                           needs room, after the gather stream has waited for the
                                                           computation, so that one gather overlaps computation
    gathered, borrowed by  gather stream; computation;     before the next gather, after the gather stream has waited
    gradients              reduce stream                   for the reduction
    gradients apart        computation; reduce stream      after the computation has waited for the reduction; at most
                                                           ``max_gradient_buffers`` are in flight
    reduced gradients      reduce stream; computation      by whoever clears ``.grad``, which the computation has got
                                                           after it has waited for the reduction
    shards on the host     host; gather stream             never; the host waits for the copies from them at the end of
                                                           a forward and of a backward, before a program may write
    =====================  ==============================  ===========================================================
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather_stream = SideStream(device, "gather")
        self.reduce_stream = SideStream(device, "reduce")
        self.replica_stream = SideStream(device, "reduce over replicas", urgent=False)
        self.max_gradient_buffers = 1
        self.prefetches: list[Callable[[], None] | None] = []
        """One for each group, in the order in which they have run forward: start to gather it for backward. None where an
        outermost forward begins: what ran before that may have a backward of its own, behind which it would be gathered
        again."""
        self._left: list[tuple[Allocation, Any]] = []
        self._host_reads: list[Any] = []
        self._reducing: list[tuple[Lender, list[ShardedReduction]]] = []
        self.finished: list[ShardedReduction] = []
        """Reductions of this backward, in the order in which they were started."""
        self.has_accumulated = False
        """Whether the last backward has left gradients unreduced."""

    # Memory of gathered parameters

    def leave(self, memory: Allocation) -> None:
        """Free a gathered buffer as soon as the computation that has been given to the device is done with it. Its contents
        are not used any more, whatever happens before."""
        self._left.append((memory, self.gather_stream.compute_done()))
        if not self.gather_stream.is_real:
            self._free_left(keep=0)

    def make_room(self, memory: Allocation | None = None, *, keep: int = 1) -> None:
        """Before the gather stream allocates ``memory``: free what the computation has left, but the last ``keep`` buffers
        unless ``memory`` is one of them, and what reductions are done with."""
        self.take_back_borrowed()
        self._free_left(keep=0 if any(left is memory for left, _ in self._left) else keep)

    def _free_left(self, *, keep: int) -> None:
        while len(self._left) > keep:
            memory, event = self._left.pop(0)
            memory.give_back(event)
            memory.free()

    def forget(self, memory: Allocation) -> None:
        """The caller frees a buffer that the computation may have left."""
        self._left = [(left, event) for left, event in self._left if left is not memory]

    def note_host_read(self) -> None:
        """The gather stream has been given a copy from shards on the host."""
        self._host_reads.append(self.gather_stream.done())

    def finish_host_reads(self) -> None:
        """Wait for copies from shards on the host, which a program may write to from now on."""
        reads, self._host_reads = self._host_reads, []
        for event in reads[-1:]:  # of one stream, in order
            self.gather_stream.host_waits(event)

    def take_back_borrowed(self) -> None:
        """Wait for reductions that read from gathered buffers: the gather stream does. On a CPU the caller waits, and also
        until fewer than ``max_gradient_buffers`` are in flight, before more memory is needed."""
        if self.reduce_stream.is_real:
            for group, reductions in self._reducing:
                group.give_back(*(reduction.event for reduction in reductions))
            return
        while len(self._reducing) >= self.max_gradient_buffers or any(group.is_borrowed for group, _ in self._reducing):
            self._finish_oldest()

    # Gradients

    def make_room_for_gradients(self, group: Lender) -> None:
        """Wait for reductions until a group may write gradients: its own buffer is free, and there are not too many."""
        limit = self.max_gradient_buffers + (1 if self.reduce_stream.is_real else 0)
        while len(self._reducing) >= limit or any(other is group for other, _ in self._reducing):
            self._finish_oldest()

    def reduce(self, group: Lender, reductions: list[ShardedReduction]) -> None:
        """Start reductions of one group; they finish when room is needed, or at the end of backward."""
        if self.has_accumulated:  # other groups may be reduced than those that this backward has gathered
            self.has_accumulated = False
            group.compare_gathers()
        self._reducing.append((group, reductions))
        group.has_unknown_work = True
        for reduction in reductions:
            reduction.start()
        group.has_unknown_work = False
        if self.reduce_stream.is_real:  # all of it can be given to the device now
            self._finish(reductions)

    def _finish(self, reductions: Sequence[ShardedReduction]) -> None:
        self.finished += [reduction for reduction in reductions if reduction.finish()]

    def _finish_oldest(self) -> None:
        group, reductions = self._reducing[0]
        if not self.reduce_stream.is_real:
            self._finish(reductions)
        for reduction in reductions:
            reduction.free()
        group.give_back(*(reduction.event for reduction in reductions))
        del self._reducing[0]
        for reduction in reductions:
            if not (self.reduce_stream.is_real and reduction.is_on_host):
                reduction.deliver()

    def finish_reductions(self) -> None:
        while self._reducing:
            self._finish_oldest()
        for reduction in self.finished:  # the host waits for copies when all have been started
            reduction.deliver()

    def abandon(self) -> None:
        """Wait for what is in flight and forget it."""
        self.reduce_stream.wait_event(self.replica_stream.done())
        for group, reductions in self._reducing:
            for reduction in reductions:
                reduction.abandon()
            if not group.has_unknown_work:
                group.give_back(self.reduce_stream.done())
        self._reducing.clear()
        self.finished.clear()
        self.prefetches.clear()
        self.has_accumulated = False
        self.make_room(keep=0)
        self.finish_host_reads()
