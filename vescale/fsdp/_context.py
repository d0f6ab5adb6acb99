"""What modules share: lanes and memory in flight (communication), and the tree under one root (iteration)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vescale.buffer import Allocation
from vescale.compat import profiled, queue_after_backward
from vescale.fsdp._lanes import Lane
from vescale.fsdp._reduction import Reduction
from vescale.fsdp._usage import settle_unused

if TYPE_CHECKING:
    from vescale.fsdp._group import ParameterGroup
    from vescale.fsdp._state import ModuleState

__all__ = ["CommContext", "TreeContext"]


class CommContext:
    """Lanes, and memory that they may still be using. Roots that run in turns may share one (``share_comm_ctx``).

    ============  ===========================================  ======================================================
    memory        allocated on, used by                        freed
    ============  ===========================================  ======================================================
    whole         gather lane; computation                     CPU: at reshard. Device: when the gather after the next
                                                               one needs room, after the gather lane has waited for the
                                                               computation, so that one gather overlaps computation
    whole, with   gather lane; computation; reduce lane        before the next gather, after the gather lane has waited
    gradients in                                               for the reduction
    place
    gradients     computation; reduce lane                     after the computation has waited for the reduction; at
    apart                                                      most ``max_gradient_buffers`` are in flight
    ============  ===========================================  ======================================================
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gather_lane = Lane(device)
        self.reduce_lane = Lane(device)
        self.replica_lane = Lane(device, urgent=False)
        self.max_gradient_buffers = 1
        self.post_forward_order: list[ParameterGroup] = []
        self._retired: list[tuple[Allocation, Any]] = []
        self._reducing: list[tuple[ParameterGroup, list[Reduction]]] = []
        self.finished: list[Reduction] = []
        """Reductions of this backward, in the order in which they were started."""

    # Memory of gathered parameters

    def retire(self, memory: Allocation) -> None:
        """Free a gathered buffer as soon as the computation that has been given to the device is done with it."""
        if not self.gather_lane.is_stream:
            memory.free()
            return
        self._retired.append((memory, self.gather_lane.compute_done()))

    def reclaim(self, memory: Allocation) -> bool:
        """Take back a buffer that was retired and is not freed yet; its contents are still there."""
        for index, (retired, _) in enumerate(self._retired):
            if retired is memory:
                del self._retired[index]
                return True
        return False

    def make_room(self, keep: int = 1) -> None:
        """Before the gather lane allocates the next buffer: free retired ones but the last ``keep``, and those that
        reductions are done with."""
        self.take_back_lent()
        while len(self._retired) > keep:
            memory, event = self._retired.pop(0)
            self.gather_lane.wait_event(event)
            memory.free()

    def take_back_lent(self) -> None:
        """Wait for reductions that read from gathered buffers: the gather lane does. On a CPU the caller waits, and also
        until fewer than ``max_gradient_buffers`` are in flight, before more memory is needed."""
        if self.reduce_lane.is_stream:
            for group, reductions in self._reducing:
                group.take_back(reductions)
            return
        while len(self._reducing) >= self.max_gradient_buffers or any(group.is_lent for group, _ in self._reducing):
            self._finish_oldest()

    # Gradients

    def make_room_for_gradients(self, group: ParameterGroup) -> None:
        """Wait for reductions until ``group`` may write gradients: its own buffer is free, and there are not too many."""
        limit = self.max_gradient_buffers + (1 if self.reduce_lane.is_stream else 0)
        while len(self._reducing) >= limit or any(other is group for other, _ in self._reducing):
            self._finish_oldest()

    def reduce(self, group: ParameterGroup, reductions: list[Reduction]) -> None:
        """Start reductions of one group; they finish when room is needed, or at the end of backward."""
        for reduction in reductions:
            reduction.start()
        self._reducing.append((group, reductions))
        if self.reduce_lane.is_stream:  # all of it can be given to the device now
            group.finish_reductions(reductions)

    def _finish_oldest(self) -> None:
        group, reductions = self._reducing.pop(0)
        if not self.reduce_lane.is_stream:
            group.finish_reductions(reductions)
        for reduction in reductions:
            self.reduce_lane.compute_waits(reduction.event)
        group.free_gradients(reductions)

    def finish_reductions(self) -> None:
        while self._reducing:
            self._finish_oldest()

    def abandon(self) -> None:
        """Wait for what is in flight and forget it."""
        for _, reductions in self._reducing:
            for reduction in reductions:
                reduction.wait()
                self.reduce_lane.compute_waits(reduction.event)
        self._reducing.clear()
        self.finished.clear()
        self.post_forward_order.clear()
        self.make_room(keep=0)


class TreeContext:
    """The states under one root, and where the root is in its iteration."""

    def __init__(self) -> None:
        self.states: list[ModuleState] = []
        self.forward_root: ModuleState | None = None
        """The module whose forward is the iteration's; a part of the tree may run alone."""
        self.is_last_backward = True
        self.on_backward: Callable[[], None] | None = None
        """Called once in every backward that reaches a state, when its end has been arranged for."""
        self.post_optimizer_event: Any = None
        self._callback_is_queued = False

    @property
    def awaits_end_of_backward(self) -> bool:
        """A backward has begun, and its end has not come; of one that is not running, an exception broke it off."""
        return self._callback_is_queued

    def at_end_of_backward(self, comm: CommContext) -> None:
        """See to it that this backward is concluded, once; called by every state that backward reaches."""
        if not self._callback_is_queued:
            self._callback_is_queued = True
            queue_after_backward(lambda: self.conclude(comm))
            if self.on_backward is not None:
                self.on_backward()

    def expect_conclusion(self) -> None:
        """Gradients are about to be reduced apart from a backward: whoever sees to that calls :meth:`conclude` himself."""
        self._callback_is_queued = True

    def conclude(self, comm: CommContext) -> None:
        """Reductions finish, and on the last backward sharded gradients are complete."""
        self.forward_root = None
        with profiled("vescale.fsdp::end_of_backward"):
            for state in reversed(self.states):
                state.conclude_backward()
            if self.is_last_backward:
                comm.finish_reductions()
                settle_unused(comm.finished)
                comm.finished.clear()
                comm.post_forward_order.clear()
                comm.make_room(keep=0)
                for state in self.states:
                    state.forget_forward_order()
        self._callback_is_queued = False

    def abandon(self) -> None:
        self.forward_root = None
        self._callback_is_queued = False
