"""Entering and leaving the modules of a parallelized model: their forward hooks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import (
    GLOBAL_HOOKS,
    has_function_modes,
    in_backward,
    local_of,
    map_tensors,
    no_torch_function,
    resume_compiling,
    suspend_compiling,
    tensors_in,
)
from vescale.compat.random_ops import count_forward
from vescale.ops import require_current, wrap_global
from vescale.runtime._activation import THREAD, Activation, Frame, activations, current_activation
from vescale.runtime._attribution import locate_node
from vescale.runtime._function_mode import RuntimeMode
from vescale.runtime._runtime import Runtime
from vescale.runtime._write_back import write_back

__all__ = ["Enter", "Leave", "checkpointed", "in_backward_of", "module_hooks", "resumed", "switch_on"]


class _Hook:
    """A forward hook of a module. It is copied with its model.

    Args:
        place: changes the module's arguments, or its output, by the plan; None: nothing to place.
        around: shows, or hides, parameters for the forward; None: there are none.
    """

    def __init__(
        self, runtime: Runtime, path: str, place: Callable[..., Any] | None, around: Callable[[nn.Module], None] | None
    ) -> None:
        self.runtime, self.path, self.place, self.around = runtime, path, place, around


class Enter(_Hook):
    """Before the forward. The outermost module switches the model's function mode on. ``place`` gets the arguments as a
    tuple and a dictionary, and returns both, and :attr:`Frame.placed`.
    ``csrc/module_hooks.cpp`` is the same in C++, without Python."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime, compiler, placed, held = self.runtime, suspend_compiling(), None, None
        if self.place is not None:
            # The mode is already on where this is not the outermost module.
            with no_torch_function():
                args, kwargs, held = self.place(args, kwargs)
                placed = args, kwargs
        activation = current_activation()
        if activation is None or activation.runtime is not runtime:
            activation = _begin(runtime, module, self.path)
        where = runtime.where(self.path)
        activation.frames.append(Frame(module, self.path, args, kwargs, compiler, where=where, placed=held))
        runtime.timeline.mark(where)
        if compiler is not None:
            _warn_of_compiler(runtime, self.path)
        if self.around is not None:
            self.around(module)
        return placed


class Leave(_Hook):
    """After the forward, also one that an exception has ended, which may have been raised before :class:`Enter` was
    through; the output is None then."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        try:
            self._settle(module)
            if output is not None and self.place is not None:
                with no_torch_function():
                    output = self.place(output)
            self._read(output)
        finally:
            if self.around is not None:
                self.around(module)
            self._leave(module, output)
        return output

    def _settle(self, module: nn.Module) -> None:
        activation = current_activation()
        if activation is None or activation.runtime is not self.runtime:
            return
        frame = activation.frames[-1]
        if frame.module is module and frame.placed is not None:
            with no_torch_function():
                write_back(frame.placed)

    def _read(self, output: Any) -> None:
        """What the outermost module returns is brought up to date: without C++, nobody sees who reads it outside."""
        activation = current_activation()
        if activation is not None and activation.runtime is self.runtime and len(activation.frames) == 1:
            for x in tensors_in(output):
                if isinstance(x, DTensor):
                    with no_torch_function():
                        require_current(x)

    def _leave(self, module: nn.Module, output: Any) -> None:
        activation = current_activation()
        if activation is None or activation.runtime is not self.runtime:
            return
        frames = activation.frames
        index = next((i for i in reversed(range(len(frames))) if frames[i].module is module), -1)
        if index < 0:
            return
        while len(frames) > index:
            resume_compiling(frames.pop().compiler)
        if index == 0:
            _end(activation)
            return
        parent = frames[-1]
        parent.results += _results(self.path, output)
        self.runtime.timeline.mark(parent.where)


def module_hooks(
    runtime: Runtime,
    path: str,
    place_inputs: Callable[..., Any] | None,
    show: Callable[[nn.Module], None] | None,
    place_outputs: Callable[..., Any] | None,
    hide: Callable[[nn.Module], None] | None,
    input_entries: tuple[Any, ...] | None,
    output_entries: tuple[Any, ...] | None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """:class:`Enter` and :class:`Leave` for a module, in C++ if the model's are: these carry out the entries by themselves
    where they can."""
    native = runtime.native
    if native is None:
        return Enter(runtime, path, place_inputs, show), Leave(runtime, path, place_outputs, hide)
    native.set_callbacks(THREAD, _begin, _end, _warn_of_compiler, _results, write_back)
    before = native.Enter(runtime, path, place_inputs, show, input_entries)
    return before, native.Leave(runtime, path, place_outputs, hide, output_entries)


def _begin(runtime: Runtime, module: nn.Module, path: str) -> Activation:
    """A forward of the model, or of a copy or a part of it, begins with the module."""
    if not runtime.has_adopted(module):
        runtime.adopt(module, path)
    if path and not in_backward():  # of the model itself, ranks have compared the inputs
        runtime.checks.step(f"a call of {path!r}, a part of the model")
    runtime.gradients.attach()
    if torch.is_grad_enabled():
        runtime.num_training_forwards += 1
        runtime.saved.begin()
    activation = Activation(runtime)
    is_later = not path and runtime.switches_on_later and _is_alone(module)
    if not is_later or torch.is_inference_mode_enabled():
        switch_on(activation)
    activations().append(activation)
    count_forward(1)
    return activation


def _is_alone(module: nn.Module) -> bool:
    """Whether nothing runs between the hooks of the runtime and the forward that they are around."""
    held = module.__dict__
    return len(held["_forward_pre_hooks"]) == len(held["_forward_hooks"]) == 1 and not any(GLOBAL_HOOKS)


def _end(activation: Activation) -> None:
    """The outermost module of this forward, the innermost one of the thread, has ended."""
    stack = activations()
    stack.pop()
    count_forward(-1)
    around = stack[-1].frames[-1].where if stack and stack[-1].frames else None
    activation.runtime.timeline.mark(around)
    if activation.contexts is not None:
        activation.contexts.close()


def _results(path: str, output: Any) -> list[tuple[str, int]]:
    """For :attr:`Frame.results` of the module that called the one at ``path``."""
    with no_torch_function():
        return [(path, local_of(t).data_ptr()) for t in tensors_in(output) if isinstance(t, DTensor) and not t.is_meta]


def switch_on(activation: Activation) -> None:
    """From here to the end of the forward, the model's function mode is on. A second call does nothing."""
    if activation.contexts is not None:
        return
    activation.contexts = contexts = ExitStack()
    if torch.is_inference_mode_enabled():
        # There, composite ops reach DTensor whole, and its rules for them gather; without gradients they do not.
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.no_grad())
    contexts.enter_context(RuntimeMode(activation))


def checkpointed(function: Callable[..., Any], is_reentrant: bool) -> Callable[..., Any]:
    """The function to checkpoint in place of ``function``: it runs in the current module, also when it is recomputed."""
    activation = current_activation()
    if activation is None:
        return function
    if (
        activation.static is not None and len(activation.frames) == 1
    ):  # else a module in eager mode, inside of a static one
        static: Callable[..., Any] = activation.static.checkpointed(function)
        return static
    if activation.recorder is not None:
        function = activation.recorder.checkpointed(function, is_reentrant)
    runtime, frame = activation.runtime, activation.frames[-1]
    module, path = frame.module, frame.path  # the frame holds arguments, and the graph would keep them

    @functools.wraps(function, updated=())
    def inside(*args: Any, **kwargs: Any) -> Any:
        with resumed(runtime, module, path):
            return function(*args, **kwargs)

    return inside


def in_backward_of(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` inside of the module whose autograd node this thread runs, as in its forward. Plain tensors among
    the gradients that it returns are global."""
    found = locate_node()
    model = found.runtime.root if found is not None else None
    if found is None or model is None:
        return function(*args)
    with resumed(found.runtime, model.get_submodule(found.path), found.path) as activation:
        result = function(*args)

    def placed(x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(x, DTensor) else wrap_global(x, activation.mesh, activation.replicated)

    with no_torch_function():
        return map_tensors(placed, result)


@contextmanager
def resumed(runtime: Runtime, module: nn.Module, path: str) -> Iterator[Activation]:
    """Inside of a module again, after its forward has ended."""
    stack = activations()
    if stack and stack[-1].runtime is runtime and has_function_modes():
        yield stack[-1]
        return
    activation = Activation(runtime)
    switch_on(activation)
    where = runtime.where(path)
    activation.frames.append(Frame(module, path, where=where))
    stack.append(activation)
    count_forward(1)
    runtime.timeline.mark(where)
    try:
        yield activation
    finally:
        _end(activation)


def _warn_of_compiler(runtime: Runtime, path: str) -> None:
    """Warn, once for a model and on its first rank, that compiling the module at ``path`` has no effect."""
    if runtime.compiles:
        return
    if not runtime.warned_of_compiler and runtime.is_first_rank:
        warnings.warn(
            f"torch.compile around {f'the module {path!r} of ' if path else ''}a parallelized model has no effect: its "
            "forward runs as it is, with the same numbers; compile functions of local tensors inside of it instead",
            stacklevel=2,
        )
    runtime.warned_of_compiler = True
