"""The autograd engine: end-of-backward callbacks, whether a backward is running, hooks of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

__all__ = ["in_backward", "queue_after_backward", "run_post_accumulate_hooks"]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has finished; RuntimeError when none is."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """What autograd does after it has accumulated into ``parameter.grad``, for a gradient that was put there."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        for hook in tuple(hooks.values()):
            hook(parameter)
