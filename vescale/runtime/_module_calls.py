"""Entering and leaving the modules of a parallelized model: their forward hooks."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.checks import replacement_of
from vescale.compat import (
    GLOBAL_HOOKS,
    filter_functions,
    has_function_modes,
    in_backward,
    in_transform,
    local_of,
    map_tensors,
    no_torch_function,
    resume_compiling,
    suspend_compiling,
    tensors_in,
    without_transforms,
)
from vescale.compat.random_ops import count_forward
from vescale.ops import When, entries, is_sparse, multiply_sparse, read_arguments, require_current, wrap_global
from vescale.runtime._activation import THREAD, Activation, Frame, activations, current_activation, locate_node
from vescale.runtime._input_checks import note_made
from vescale.runtime._placing import write_back
from vescale.runtime._runtime import Runtime

# Tensors made inside a model's forward: every rank makes the global tensor and keeps its local part.

# Functions that make a tensor from numbers. Random ones draw the same on every rank: generators are in the same state.
_NAMES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range scalar_tensor tensor
    tril_indices triu_indices zeros
"""
FACTORIES = frozenset(getattr(torch, name) for name in _NAMES.split())

# The same as methods of a plain tensor; on a DTensor they are DTensor's own.
METHOD_FACTORIES = frozenset(
    getattr(torch.Tensor, name) for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
)


_OF_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor))
"""Of these, the values come from the program."""


def place_made(activation: Activation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory and give its result the placements of the running module's ``factory`` entry, Replicate without one."""
    made = func(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or isinstance(made, DTensor) or "out" in kwargs or in_transform():
        return made  # what a function makes under vmap (masks) is plain there, and global where it meets a DTensor
    if func in _OF_DATA and activation.runtime.compares_made:
        note_made(activation.runtime, f"a tensor of torch.{func.__name__}", activation.frames[-1].path, made)
    placements = activation.factory_placements()
    if any(getattr(placement, "dim", -1) >= made.ndim for placement in placements):
        placements = activation.replicated  # a scalar or an index vector inside a region of sharded factories
    return wrap_global(made, activation.mesh, placements, "factory")


# The torch function mode of a parallelized model's forward. It changes torch functions in four ways, and passes every
# other call through: * tensors made from numbers (``arange``, ``zeros``, masks) become DTensors:
# :mod:`vescale.runtime._module_calls`; * a plain tensor among DTensors is taken as a global tensor, the same on every
# rank; * functions in the registry of :mod:`vescale.ops` (attention, embedding, item assignment) run what is registered
# there; * functions of ``torch.nn.functional`` that call others (``multi_head_attention_forward``) are opened, so that
# the mode sees what happens inside.


class RuntimeMode(TorchFunctionMode):
    """See the module's description. While a function's own code runs, the mode is off."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self._entries = entries()
        if not activation.runtime.compares_made:  # which sees all calls
            filter_functions(self, RuntimeMode.__torch_function__, _when())

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._call(func, args, kwargs)
        states = self.activation.runtime.random_states
        if states is not None:
            states.see(func, args, kwargs, result)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in FACTORIES:
            if not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
                self._tell("factory")
                return place_made(self.activation, func, args, kwargs)
            return func(*args, **kwargs)
        if func in METHOD_FACTORIES and not isinstance(args[0], DTensor):
            self._tell("factory")
            return place_made(self.activation, func, args, kwargs)
        if func in _OPENED:
            self._tell("opened")
            with self:
                return _OPENED[func](*args, **kwargs)
        mixed = _mixed(args, kwargs)
        if mixed is None:
            return func(*args, **kwargs)
        read_arguments(func, args, kwargs)
        if mixed:
            self._tell("plain operand")
            if any(map(is_sparse, tensors_in((args, kwargs)))):
                return multiply_sparse(func, args, kwargs)
            args, kwargs = self._globalize(args), self._globalize(kwargs)
        entry = self._entries.get(func)
        if entry is not None and entry.function is not None:
            self._tell("registered function")
            return entry.function(self.activation, func, args, kwargs)
        return func(*args, **kwargs)

    def _tell(self, what: str) -> None:
        if self.activation.recorder is not None:
            self.activation.recorder.take_over(what)

    def _globalize(self, value: Any) -> Any:
        """Plain tensors with dims become Replicate DTensors; DTensor accepts scalars as they are."""
        if isinstance(value, tuple | list):
            return type(value)(self._globalize(item) for item in value)
        if isinstance(value, dict):
            return {key: self._globalize(item) for key, item in value.items()}
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim:
            activation, replaced = self.activation, replacement_of(value)
            if replaced is not None and value.requires_grad and torch.is_grad_enabled():
                raise replaced.error("the model's forward takes")
            if activation.runtime.compares_made:
                note_made(activation.runtime, "a plain tensor among the model's", activation.frames[-1].path, value)
            return wrap_global(value, self.activation.mesh, self.activation.replicated, "plain operand")
        return value


@functools.cache
def _when() -> dict[Any, Any]:
    """For functions that the mode does something for: for which operands, or whom to ask. All are registered by now."""
    always = (*FACTORIES, *METHOD_FACTORIES, *_OPENED)
    registered = {func: entry.changes or entry.when for func, entry in entries().items() if entry.function is not None}
    return {**registered, **dict.fromkeys(always, When.ALWAYS)}


def _mixed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Whether a plain tensor with dims is among the arguments; None if no DTensor is, or one inside of a transform."""
    has_dtensor = has_plain = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, DTensor):
                has_dtensor = True
            elif isinstance(item, torch.Tensor) and item.ndim:
                if isinstance(without_transforms(item), DTensor):  # torch.func calls the op with the DTensor itself
                    return None
                has_plain = True
    return has_plain if has_dtensor else None


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` without the check that passes the call to a function mode."""
    assert isinstance(function, types.FunctionType)
    unchecked = {name: (lambda *_: False) for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **unchecked},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPENED: dict[Any, Callable[..., Any]] = {function: _opened(function) for function in (F.multi_head_attention_forward,)}


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
            warn_of_compiler(runtime, self.path)
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
    native.set_callbacks(THREAD, _begin, _end, warn_of_compiler, _results, write_back)
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


def warn_of_compiler(runtime: Runtime, path: str) -> None:
    """Warn, once for a model and on its first rank, that compiling the module at ``path`` has no effect."""
    if not runtime.warned_of_compiler and runtime.is_first_rank:
        warnings.warn(
            f"torch.compile around {f'the module {path!r} of ' if path else ''}a parallelized model has no effect: "
            "its forward runs uncompiled, with the same results; compile functions of local tensors inside it instead",
            stacklevel=2,
        )
    runtime.warned_of_compiler = True
