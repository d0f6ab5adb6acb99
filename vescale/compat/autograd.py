"""The autograd engine: what runs when a backward has ended, and memory that nobody sees any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

__all__ = ["at_end_of_backward", "is_captured", "num_storage_users"]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the outermost backward that is running has ended, on the thread that called it.

    A backward may run inside another (reentrant activation checkpointing), and the engine ends each with its callbacks.
    An inner one's is handed on to the node of the outer one that started it. RuntimeError outside of any backward.
    """

    def ended() -> None:
        outer = torch._C._current_autograd_node()
        if outer is None:
            callback()
            return
        handle: list[Any] = []

        def hand_on(*_: Any) -> None:
            handle[0].remove()
            at_end_of_backward(callback)

        handle.append(outer.register_hook(hand_on))

    Variable._execution_engine.queue_callback(ended)


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and Python objects hold the memory of ``tensor``: to compare with what it was before."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_captured(leaf: torch.Tensor) -> bool:
    """Inside a backward: whether ``torch.autograd.grad`` is running, so that no gradient of ``leaf`` is accumulated."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # the engine refuses to say so of leaves, under autograd.grad alone
        return True
    return False
