"""The torch function mode of a parallelized model's forward.

It changes torch functions in four ways, and passes every other call through:

* tensors made from numbers (``arange``, ``zeros``, masks) become DTensors: :mod:`vescale.runtime._factories`;
* a plain tensor among DTensors is taken as a global tensor, the same on every rank;
* functions in the registry of :mod:`vescale.ops` (attention, embedding, item assignment) run what is registered there;
* functions of ``torch.nn.functional`` that call others (``multi_head_attention_forward``) are opened, so that the mode
  sees what happens inside.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.checks import replacement_of
from vescale.compat import filter_functions, tensors_in, without_transforms
from vescale.ops import When, entries, is_sparse, multiply_sparse, read_arguments, wrap_global
from vescale.runtime._activation import Activation
from vescale.runtime._factories import FACTORIES, METHOD_FACTORIES, place_made
from vescale.runtime._input_checks import note_made

__all__ = ["RuntimeMode"]


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
            if _plain_only(args, kwargs):
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


def _plain_only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))


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
