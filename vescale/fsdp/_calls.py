"""``Calls``: the forward calls of a module for which a backward may still come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, register_multi_grad_hook

from vescale.compat import current_backward, will_run

__all__ = ["Calls"]


class _Call:
    """One forward call: the nodes that its inputs' gradients arrive at, and the last backward in which all have."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.ended_in = -1


class Calls:
    """Which calls the running backward will still come to is asked of autograd's engine, and not counted: some calls have no
    backward, or one together with another call, or several (``retain_graph``), and a backward may reach some of them only.

    Calls live as long as the graph they are part of; a forward without a backward leaves nothing behind.
    """

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()

    def add(self, inputs: Sequence[torch.Tensor], when_ended: Callable[[], None]) -> None:
        """A call with these inputs, results of ops. ``when_ended`` runs in each backward that reaches some of them, when
        their gradients are there."""
        call = _Call([tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None])
        self._calls.add(call)

        def end(_: Any) -> None:
            call.ended_in = current_backward()
            when_ended()

        register_multi_grad_hook(inputs, end)

    @property
    def are_awaited(self) -> bool:
        """Inside a backward: whether it will still come to the inputs of some call."""
        now = current_backward()
        return any(call.ended_in != now and any(map(will_run, call.nodes)) for call in self._calls)
