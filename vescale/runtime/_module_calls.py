"""Entering and leaving the modules of a parallelized model."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, resume_compiling, tensors_in
from vescale.runtime._activation import Activation, Frame, activations, current_activation
from vescale.runtime._function_mode import RuntimeMode
from vescale.runtime._runtime import Runtime

__all__ = ["checkpointed", "enter", "leave", "warn_of_compiler"]


def enter(runtime: Runtime, module: nn.Module, path: str, arguments: tuple[Any, ...]) -> Activation:
    """A module of the model starts its forward; the outermost one switches the model's function mode on."""
    stack = activations()
    if not stack or stack[-1].runtime is not runtime:
        if not runtime.has_adopted(module):
            runtime.adopt(module, path)
        runtime.gradients.attach()
        stack.append(_activate(runtime))
    activation = stack[-1]
    activation.frames.append(Frame(module, path, arguments))
    runtime.timeline.mark(path)
    return activation


def leave(runtime: Runtime, module: nn.Module, output: Any) -> None:
    """The module's forward has ended, also by an exception, which may have been raised before :func:`enter`."""
    stack = activations()
    if not stack or stack[-1].runtime is not runtime:
        return
    activation = stack[-1]
    if not any(frame.module is module for frame in activation.frames):
        return
    while True:
        frame = activation.frames.pop()
        resume_compiling(frame.compiler)
        if frame.module is module:
            break
    if activation.frames:
        parent = activation.frames[-1]
        own = runtime.name_of(module)
        parent.results += [
            (own, local_of(t).data_ptr()) for t in tensors_in(output) if isinstance(t, DTensor) and not t.is_meta
        ]
        runtime.timeline.mark(parent.path)
    else:
        runtime.timeline.mark(None)
        stack.pop()
        activation.contexts.close()


def _activate(runtime: Runtime) -> Activation:
    activation = Activation(runtime)
    if torch.is_inference_mode_enabled():
        # There, composite ops reach DTensor whole, and its rules for them gather; without gradients they do not.
        activation.contexts.enter_context(torch.inference_mode(False))
        activation.contexts.enter_context(torch.no_grad())
    activation.contexts.enter_context(RuntimeMode(activation))
    return activation


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function to checkpoint in place of ``function``: it runs in the current module, also when it is recomputed."""
    activation = current_activation()
    if activation is None:
        return function
    runtime, frame = activation.runtime, activation.frames[-1]

    @functools.wraps(function, updated=())
    def inside(*args: Any, **kwargs: Any) -> Any:
        with _resumed(runtime, frame):
            return function(*args, **kwargs)

    return inside


@contextmanager
def _resumed(runtime: Runtime, frame: Frame) -> Iterator[None]:
    """Inside of the module of ``frame`` again, after its forward has ended."""
    stack = activations()
    if stack and stack[-1].runtime is runtime:
        yield
        return
    activation = _activate(runtime)
    activation.frames.append(Frame(frame.module, frame.path, ()))
    stack.append(activation)
    runtime.timeline.mark(frame.path)
    try:
        yield
    finally:
        runtime.timeline.mark(None)
        stack.pop().contexts.close()


def warn_of_compiler(runtime: Runtime, path: str) -> None:
    """Warn, once for a model and on its first rank, that compiling the module at ``path`` has no effect."""
    if not runtime.warned_of_compiler and runtime.is_first_rank:
        warnings.warn(
            f"torch.compile around {f'the module {path!r} of ' if path else ''}a parallelized model has no effect: its "
            "forward runs as it is, with the same numbers; compile functions of local tensors inside of it instead",
            stacklevel=2,
        )
    runtime.warned_of_compiler = True
