"""``torch.compile`` of models in static mode: forwards of modules are compiled, what moves tensors between them is not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vescale.compat import compiled_call, compiled_like, run_compiled

__all__ = ["Compiling", "has_compiled_parts"]


class Compiling:
    """What compilers see of the functions of a static forward.

    Args:
        is_on: whether a compiler is there; else all functions stay as they are.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._compiler: Any = None  # of the whole model, while it runs

    def run(self, compiler: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, compiled by what ``suspend_compiling`` returned."""
        if compiler is None or not self.is_on:
            return function(*args, **kwargs)
        self._compiler = compiler
        try:
            return run_compiled(compiler, function, args, kwargs)
        finally:
            self._compiler = None

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """It is not compiled, nor is what it calls, except :meth:`inside`."""
        if not self.is_on:
            return function
        called: Any = function
        return torch.compiler.disable(called if isinstance(function, types.FunctionType) else called.__call__)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """It is compiled, though it is called by what is not."""
        if not self.is_on:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._compiler is None:
                return function(*args, **kwargs)
            return run_compiled(self._compiler, function, args, kwargs)

        return run

    def as_the_module(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` is compiled if the user has compiled the module, in the same way."""
        compiled = compiled_call(module) if self.is_on else None
        return forward if compiled is None else compiled_like(compiled, forward)


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the user has compiled a module of the model (``module.compile()``), or the model."""
    return any(compiled_call(module) is not None for module in model.modules())
