"""``Calls``: the forward calls of a module for which a backward may still come."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import Node

from vescale.compat import (
    Exchanged,
    current_backward,
    held_tensors,
    node_sequence,
    storage_of,
    tensors_in,
    weak_node,
    will_run,
)

# Nodes that have computed gradients with a graph of their own (``create_graph``), weakly.
_GRAPHS: list[Callable[[], Any]] = []


def see_graphs(gradients: Iterable[torch.Tensor | None]) -> None:
    """A backward has computed these gradients: some may have graphs."""
    _GRAPHS.extend(weak_node(each) for each in gradients if each is not None and each.requires_grad)


def held_by_graphs() -> set[int]:
    """The addresses of what graphs of gradients hold that no backward has released."""
    _GRAPHS[:] = [known for known in _GRAPHS if known() is not None]
    held = (storage_of(tensor) for _, tensor in held_tensors(known() for known in _GRAPHS))
    return {storage.data_ptr() for storage in held if storage is not None and storage.nbytes()}


class Call:
    """One forward call, and where the gradients of its inputs arrive.

    Only the hooks of the call's outputs hold it, so that it is freed together with the graph, at once and without the
    garbage collector.
    """

    def __init__(self, watched: list[torch.Tensor]) -> None:
        self.nodes = [tensor.grad_fn for tensor in watched if tensor.grad_fn is not None]
        bases = (tensor._base for tensor in watched)
        before = [base.grad_fn for base in bases if base is not None and base.grad_fn is not None]
        self._given = [*self.nodes, *before]
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

    def was_given(self, node: Node | None) -> bool:
        """Whether a gradient that arrives at ``node`` is one of an input, or of what that is a view of: of an output that is
        an input, and has no part in the call's backward."""
        return any(node is one for one in self._given)

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

    def watch_inputs(
        self, args: Any, kwargs: Any, exchanged: Exchanged, when_ended: Callable[[], None]
    ) -> tuple[Any, Any, Call | None]:
        """The inputs of a call as views of themselves, so that what other modules do with the same tensors does not count;
        a view may be written to like the tensor itself. ``when_ended`` runs in each backward that reaches some of them, when
        their gradients are there; not once the call is gone."""
        watched: list[torch.Tensor] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            watched.append(tensor.view_as(tensor))
            return watched[-1]

        args, kwargs = exchanged.exchange(watch, args), exchanged.exchange(watch, kwargs)
        if not watched:
            return args, kwargs, None
        call = Call(watched)
        self._calls.add(call)
        known = weakref.ref(call)

        def arrive(gradient: torch.Tensor | None) -> None:
            see_graphs([gradient])
            own = known()
            if own is not None and own.arrive():
                when_ended()

        for tensor in watched:
            tensor.register_hook(arrive)
        return args, kwargs, call

    @property
    def are_awaited(self) -> bool:
        """Inside a backward: whether it will still come to the inputs of some call."""
        now = current_backward()
        return any(call.ended_in != now and any(map(will_run, call.nodes)) for call in self._calls)


def watch_outputs(output: Any, given: Any, call: Call | None, begin: Callable[..., None]) -> bool:
    """Call ``begin`` for each gradient of an output, also of those that a call has put into containers that it was
    ``given``, from hooks that hold the call; whether there can be any."""

    def hook(node: Node | None) -> Callable[..., None]:
        return functools.partial(begin, call) if call is not None and call.may_be_held_by(node) else begin

    def was_given(node: Node | None) -> bool:
        return call is not None and call.was_given(node)

    found = False
    put = (x for x in tensors_in(given) if call is not None and call.may_be_held_by(x.grad_fn))
    for tensor in itertools.chain(tensors_in(output), put):
        if not tensor.requires_grad or was_given(tensor.grad_fn):
            continue
        found = True
        tensor.register_hook(hook(tensor.grad_fn))
        base = tensor._base
        if base is not None and base.grad_fn is not None and not was_given(base.grad_fn):
            # An in-place op on a view drops the view's own history, and the hook with it; its base's stays.
            base.grad_fn.register_prehook(hook(base.grad_fn))
    return found
