"""What the autograd graph of a forward holds until its backward: read from the nodes, without unpacking anything."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vescale import csrc


def weak_node(tensor: torch.Tensor) -> Callable[[], Any]:
    """A function that returns the node that made the tensor, while the graph exists; without a compiler, while the tensor
    exists. It returns None for a view whose base was written to where autograd does not allow it: using it raises."""
    module: Any = csrc.dispatcher()
    if module is not None:
        try:
            found: Callable[[], Any] = module.WeakNode(tensor)
        except RuntimeError:  # from grad_fn
            return lambda: None
        return found
    reference = weakref.ref(tensor)

    def node() -> Any:
        alive = reference()
        return None if alive is None else alive.grad_fn

    return node


def held_tensors(roots: Iterable[Any], stop: Iterable[Any] = ()) -> Iterator[tuple[Any, torch.Tensor]]:
    """(node, tensor) for all that the graph from the nodes ``roots`` to those of ``stop`` has saved. What hooks have packed
    into something else than a tensor is left out, and so is what a backward has released."""
    module: Any = csrc.dispatcher()
    stack, seen = [node for node in roots if node is not None], {node for node in stop if node is not None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for saved in _saved_variables(node):
            data = _data(saved)
            if isinstance(data, torch.Tensor):
                yield node, data
        if module is not None:
            for tensor in module.held_by(node):
                yield node, tensor
        stack.extend(following for following, _ in node.next_functions if following is not None)


def _saved_variables(node: Any) -> Iterator[Any]:
    kind = type(node)
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # released
            continue
        yield from value if isinstance(value, tuple | list) else (value,)


def _data(saved: Any) -> Any:
    try:
        return getattr(saved, "data", None)
    except RuntimeError:
        return None


# The attributes of each kind of node that hold saved variables.
_NAMES: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
