"""``Tree``: the states under one root, and where the root is in its iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from vescale.compat import profiled
from vescale.fsdp._context import CommContext, RootOrders
from vescale.fsdp._group import ParameterGroup
from vescale.fsdp._step_comparison import StepComparison
from vescale.gradients import BackwardTracker, OneBackward, reduce_unused


class Member(Protocol):
    """A state, as far as a tree knows it."""

    groups: list[ParameterGroup]

    def break_off_backward(self) -> None: ...

    def use_unwatched(self) -> None: ...

    def conclude_backward(self, *, is_last: bool) -> None: ...


MemberT = TypeVar("MemberT", bound=Member)


class Tree(Generic[MemberT]):
    """The states under one root, and where the root is in its iteration.

    Attributes:
        comm: what the groups of all states communicate through.
        forward_root: the module whose forward is the iteration's; a part of the tree may run alone.
        on_backward: called once in every backward that reaches a state, when its end has been arranged for.
        awaits_conclusion: gradients may be there that :meth:`conclude` has not seen.
    """

    def __init__(self, comm: CommContext) -> None:
        self.comm, self.orders = comm, RootOrders()
        self.states: list[MemberT] = []
        self.forward_root: MemberT | None = None
        self.is_last_backward = True
        self.on_backward: Callable[[], None] | None = None
        self.post_optimizer_event: Any = None
        self.awaits_conclusion = False
        self._backward = BackwardTracker(self.conclude, self._break_off_backward)
        self._one_backward, self._name = OneBackward(comm.device.type), ""
        self._steps: StepComparison | None = None

    def begin(self, root: nn.Module, groups: Sequence[ParameterGroup], *, compares_steps: bool) -> None:
        """Before the first forward of ``root``, which has ``groups``. All data-parallel ranks call it together, and compare
        their steps from now on, if ``compares_steps``."""
        self._name = name = type(root).__name__.removeprefix("FSDP")
        self.orders.begin(name)
        self._steps = StepComparison(name, groups if compares_steps else ())

    def begin_forward(self, module: nn.Module, groups: Sequence[ParameterGroup]) -> None:
        """Before the outermost forward of an iteration, of a module that has ``groups``.

        Raises StepMismatchError, on every rank that comes, where ranks are about to do different things.
        """
        self.orders.end_turns()  # an exception may have ended the last backward
        if self._steps is not None:
            self._steps.forward(module, groups)

    def note_write(self, parameter: str, digest: str) -> None:
        """A forward has written to a gathered parameter; the ranks compare what, with their next step."""
        if self._steps is not None:
            self._steps.note_write(parameter, digest)

    def break_off_forward(self) -> None:
        """An exception has ended the outermost forward."""
        self.forward_root = None
        if self._steps is not None:
            self._steps.is_repeated = True

    def _break_off_backward(self) -> None:
        for state in self.states:
            state.break_off_backward()

    @property
    def is_broken_off(self) -> bool:
        """Whether an exception has ended a backward."""
        return self.awaits_conclusion and self._backward.current() is None

    def follow_backward(self) -> None:
        """Conclude the running backward at its end; called by every state that it reaches.

        Raises ConcurrentBackwardError while another thread runs one.
        """
        self._one_backward.enter(lambda: self._name)
        if not self.awaits_conclusion:
            self.awaits_conclusion = True
            self._backward.follow()
            for state in self.states:
                state.use_unwatched()
            if self.on_backward is not None:
                self.on_backward()
            if self._steps is not None:
                self._steps.backward([group for state in self.states for group in state.groups])

    def expect_conclusion(self) -> None:
        """Gradients are about to be reduced apart from a backward; the caller then calls :meth:`conclude`."""
        self.awaits_conclusion = True

    def conclude(self) -> None:
        """Reductions finish, and on the last backward sharded gradients are complete."""
        comm = self.comm
        self.forward_root = None
        with profiled("vescale.fsdp::end_of_backward"):
            for state in reversed(self.states):
                state.conclude_backward(is_last=self.is_last_backward)
            if self.is_last_backward:
                comm.finish_reductions()
                finished, comm.finished = comm.finished, []
                if finished:
                    reduce_unused(finished)
                else:
                    self.orders.compare_gathers(will_reduce=True)
                    comm.has_accumulated = True
                comm.prefetches.clear()
                comm.make_room(keep=0)
        self.orders.end_turns()
        self.awaits_conclusion = False

    def abandon(self) -> None:
        """Forget the iteration after an exception."""
        self.forward_root = None
        self.awaits_conclusion = False
        self._backward.forget()
