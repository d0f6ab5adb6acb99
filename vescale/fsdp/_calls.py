"""``Calls``: the forward calls of a module for which a backward may still come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import Node

from vescale.compat import current_backward, node_sequence, will_run

__all__ = ["Call", "Calls"]


class Call:
    """One forward call, and where the gradients of its inputs arrive.

    To be held by the hooks of the call's outputs, and by nothing that leads to them: it then goes with the graph that may
    bring a backward, at once and without the garbage collector. A call that is gone is awaited by nobody.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.ended_in = -1
        """The last backward in which all gradients have arrived that it computes."""
        self._begun_in, self._num_missing = -1, 0

    def arrive(self) -> bool:
        """One gradient has arrived; whether it is the last one of this backward."""
        now = current_backward()
        if self._begun_in != now:
            self._begun_in, self._num_missing = now, sum(map(will_run, self.nodes))
        self._num_missing -= 1
        if self._num_missing == 0:
            self.ended_in = now
        return self._num_missing == 0

    def may_be_held_by(self, node: Node | None) -> bool:
        """Whether ``node`` comes after the inputs in the graph: one made before them may be what they were computed from,
        and would hold itself."""
        return node is not None and node_sequence(node) > max(map(node_sequence, self.nodes))


class Calls:
    """Which calls the running backward will still come to is asked of autograd's engine, and not counted: some calls have no
    backward, or one together with another call, or several (``retain_graph``), and a backward may reach some of them only.
    """

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()

    def add(self, inputs: Sequence[torch.Tensor], when_ended: Callable[[], None]) -> Call:
        """A call with these inputs, results of ops. ``when_ended`` runs in each backward that reaches some of them, when
        their gradients are there; not once the call is gone."""
        call = Call([tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None])
        self._calls.add(call)
        known = weakref.ref(call)

        def arrive(_: torch.Tensor | None) -> None:
            own = known()
            if own is not None and own.arrive():
                when_ended()

        for tensor in inputs:
            tensor.register_hook(arrive)
        return call

    @property
    def are_awaited(self) -> bool:
        """Inside a backward: whether it will still come to the inputs of some call."""
        now = current_backward()
        return any(call.ended_in != now and any(map(will_run, call.nodes)) for call in self._calls)
