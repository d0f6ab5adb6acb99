"""What ranks compare of their optimizers' steps: hyperparameters, and for how many parameters there are gradients.

Where each rank holds a part of every parameter, nothing else tells that one rank has another learning rate, skips a step, or
has dropped a gradient. PyTorch's hooks before the step of any optimizer see the first steps, and then every
``VESCALE_CHECK_EVERY``-th.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.checks._descriptions import hash_of
from vescale.checks._mismatches import STEPPED
from vescale.checks._settings import FIRST, check_every, is_unchecked
from vescale.compat import no_torch_function, note, spec_of

__all__ = ["STEP_LISTENERS", "watch_optimizers"]

Row = tuple[str, str]
Listener = Callable[[DeviceMesh, Sequence[Row], Row], None]
# Called with a mesh on which an optimizer has parameters, the numbers of a group, and how many gradients there are.
STEP_LISTENERS: list[Listener] = []
_COUNTS: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_NUMBERS = (bool, int, float, str)
_MAX_GROUPS = 8


def watch_optimizers(listener: Listener) -> None:
    """From now on, tell ``listener`` of steps of optimizers that hold DTensors."""
    if not STEP_LISTENERS:
        note("checks._optimizer_steps:torch", "torch.optim.optimizer._global_optimizer_pre_hooks")
        register_optimizer_step_pre_hook(_before_step)
    if listener not in STEP_LISTENERS:
        STEP_LISTENERS.append(listener)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if next(_dtensors(optimizer), None) is None:
        return
    count = _COUNTS[optimizer] = _COUNTS.get(optimizer, 0) + 1
    every = check_every()
    if (count > FIRST and not (every and count % every == 0)) or is_unchecked():
        return
    with no_torch_function():
        for mesh in {id(spec_of(p).mesh): spec_of(p).mesh for p in _dtensors(optimizer)}.values():
            for number, group in enumerate(optimizer.param_groups):
                params = [p for p in group["params"] if isinstance(p, DTensor) and spec_of(p).mesh is mesh]
                if params:
                    name = f"step {count} of {type(optimizer).__name__}, group {number}"
                    grads = f"{sum(p.grad is not None for p in params)} of {len(params)}"
                    rows = [(f"{STEPPED}{key} of {name}", text) for key, text in _numbers(group)]
                    if number >= _MAX_GROUPS:
                        rows = [(f"{STEPPED}{name}", hash_of(repr(rows)))]
                    for listener in STEP_LISTENERS:
                        listener(mesh, rows, (f"{STEPPED}number of gradients of {name}", grads))


def _dtensors(optimizer: Optimizer) -> Iterator[DTensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))


def _numbers(group: dict[str, Any]) -> Iterator[Row]:
    found = ((name, _value(value)) for name, value in group.items() if name not in ("params", "param_names"))
    return ((name, text) for name, text in found if text)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if type(value) is torch.Tensor and value.is_cpu and not value.ndim else ""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    return repr(value) if isinstance(value, _NUMBERS) else ""
