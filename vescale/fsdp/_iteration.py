"""``Iteration``: the states under one root, and where the root is in a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import nn

from vescale.checks import TrainedParameters
from vescale.compat import in_backward, profiled
from vescale.fsdp._calls import held_by_graphs
from vescale.fsdp._context import CommContext, RootOrders
from vescale.fsdp._contract import ROOT, Move, ResidencyError, Stage
from vescale.fsdp._step_comparison import StepComparison
from vescale.gradients import BackwardTracker, OneBackward, reduce_unused

MemberT = TypeVar("MemberT", bound="Member")


class Member(Protocol):
    """A state, as far as an iteration knows it."""

    @property
    def groups(self) -> Sequence[Any]: ...

    def break_off_backward(self) -> None: ...

    def use_unwatched(self) -> None: ...

    def conclude_backward(self, *, is_last: bool, read_later: Collection[int]) -> None: ...

    def abandon_forward(self) -> None: ...

    def abandon(self) -> None: ...


class Iteration(Generic[MemberT]):
    """Where a root is in a step; it has the states of the modules below, and what they communicate through.

    Attributes:
        stage: changes by the contract of :class:`Stage` only.
        comm: what the groups of all states communicate through.
        forward_root: the module whose forward is the outermost one; a part may run alone.
        is_last_backward: see :meth:`FSDPModule.set_is_last_backward`.
        on_backward: called once in every backward that reaches a state, when its end has been arranged for.
    """

    def __init__(self, comm: CommContext) -> None:
        self.comm, self.orders = comm, RootOrders()
        self.stage = Stage.IDLE
        self.states: list[MemberT] = []
        self.forward_root: MemberT | None = None
        self.is_last_backward = True
        self.on_backward: Callable[[], None] | None = None
        self.post_optimizer_event: Any = None
        self._backward = BackwardTracker(self.conclude, self._break_off_backward)
        self._one_backward, self._name = OneBackward(comm.device.type), ""
        self._steps: StepComparison | None = None
        self._trained, self._enrolled = TrainedParameters(), ""

    def _move(self, event: Move) -> None:
        found = ROOT.get((self.stage, event))
        if found is None:
            raise ResidencyError(f"the root {self._name!r}", self.stage, event, ROOT)
        self.stage = found

    @property
    def has_backward(self) -> bool:
        """Whether gradients may be there that no :meth:`conclude` has seen."""
        return self.stage in (Stage.BACKWARD, Stage.NESTED)

    def begin(self, root: nn.Module, groups: Sequence[Any], *, compares_steps: bool) -> None:
        """Before the first forward of ``root``, which has ``groups``. All data-parallel ranks call it together, and compare
        their steps from now on, if ``compares_steps``."""
        self._name = name = type(root).__name__.removeprefix("FSDP")
        self.orders.begin(name)
        self._steps = StepComparison(name, groups if compares_steps else ())
        if compares_steps:
            self._enrolled = self._trained.see((p.name, p.sharded) for group in groups for p in group.parameters)

    def order_gathers(self, *, is_used: bool = True) -> None:
        """Before a program's own gathers, or a forward: gathers wait for the optimizer, which may still write parameters.
        ``is_used``: the event that :meth:`FSDPModule.set_post_optim_event` was given holds for this once."""
        stream, event = self.comm.gather_stream, self.post_optimizer_event
        if event is None:
            stream.wait_for_compute()
        else:
            stream.wait_event(event)
        if is_used:
            self.post_optimizer_event = None

    def begin_forward(self, module: nn.Module, groups: Sequence[Any]) -> None:
        """Before the outermost forward of a step, of a module that has ``groups``.

        Raises StepMismatchError, on every rank that comes, where ranks are about to do different things.
        """
        self.orders.end_turns()  # an exception may have ended the last backward
        trained = self._trained.changed()
        if trained is not None:
            self.orders.note_trained("" if trained == self._enrolled else trained)
        if self._steps is not None:
            self._steps.forward(module, groups)

    def note_write(self, parameter: str, digest: str) -> None:
        """A forward has written to a gathered parameter; the ranks compare what, with their next step."""
        if self._steps is not None:
            self._steps.note_write(parameter, digest)

    def enter_forward(self, root: MemberT) -> None:
        """The forward of ``root`` is the outermost one from now on."""
        self.forward_root = root  # first: what comes after may be interrupted
        self.comm.prefetches.append(None)
        self._move(Move.BEGIN_FORWARD)

    def leave_forward(self, *, with_gradients: bool) -> None:
        """It has ended. Not ``with_gradients``: no backward will compare what the ranks have gathered."""
        self.comm.make_room(keep=0)
        self.comm.finish_host_reads()
        if not with_gradients:
            self.orders.compare_gathers(will_reduce=False)
        self._move(Move.END_FORWARD)
        self.forward_root = None

    def break_off_forward(self) -> None:
        """An exception has ended the outermost forward: no group is gathered."""
        self.comm.prefetches.clear()
        for state in self.states:
            state.abandon_forward()
        if self._steps is not None:
            self._steps.is_repeated = True
        self._move(Move.ABANDON_FORWARD)
        self.forward_root = None

    def _break_off_backward(self) -> None:
        for state in self.states:
            state.break_off_backward()

    @property
    def is_broken_off(self) -> bool:
        """Whether an exception has ended a backward. What runs it on a device may hold on to it for a while after its caller
        has got the exception; this thread is inside of no backward then."""
        if not self.has_backward or self._backward.current() is None:
            return self.has_backward
        return self.comm.device.type != "cpu" and not in_backward()

    def follow_backward(self) -> None:
        """Conclude the running backward at its end; called by every state that it reaches.

        Raises GradientError while another thread runs one.
        """
        self._one_backward.enter(lambda: self._name)
        if not self.has_backward:
            self.expect_conclusion()  # first: what comes after may be interrupted
            self._backward.follow()
            for state in self.states:
                state.use_unwatched()
            if self.on_backward is not None:
                self.on_backward()
            if self._steps is not None:
                self._steps.backward([group for state in self.states for group in state.groups])

    def expect_conclusion(self) -> None:
        """Gradients are about to be reduced apart from a backward; the caller then calls :meth:`conclude`."""
        if not self.has_backward:
            self._move(Move.BEGIN_BACKWARD)

    def conclude(self) -> None:
        """Reductions finish, and on the last backward sharded gradients are complete."""
        comm = self.comm
        with profiled("vescale.fsdp::end_of_backward"):
            is_read = any(group.is_read_by_graph for state in self.states for group in state.groups)
            read_later = held_by_graphs() if is_read else ()
            for state in reversed(self.states):
                state.conclude_backward(is_last=self.is_last_backward, read_later=read_later)
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
            comm.finish_host_reads()
        self.orders.end_turns()
        self._move(Move.CONCLUDE)

    def abandon(self) -> None:
        """After an exception, wherever it has ended the step: forget the step, gradients included."""
        self.comm.abandon()
        for state in self.states:
            state.abandon()
        self.forward_root = None
        self._backward.forget()
        self._move(Move.ABANDON)
