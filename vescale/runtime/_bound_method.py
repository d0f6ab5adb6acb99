"""``BoundMethod``: a function of a runtime and a module, as a method of that module alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from vescale.compat import note
from vescale.runtime._runtime import Runtime


class BoundMethod:
    """An attribute of a module that takes the place of a method of its class. It is copied with the module, and then belongs
    to the copy and the copy's runtime.

    Args:
        function: of the runtime, the module, and the arguments of the call.
    """

    def __init__(self, function: Callable[..., Any], runtime: Runtime, module: nn.Module, name: str) -> None:
        self.function, self.runtime, self.module = function, runtime, module
        self.__wrapped__ = functools.partial(getattr(type(module), name), module)  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.runtime, self.module, *args, **kwargs)

    @staticmethod
    def give(runtime: Runtime, module: nn.Module, name: str, function: Callable[..., Any]) -> bool:
        """Let ``module.name(...)`` call ``function``, if its class has a method of this name."""
        if not callable(getattr(type(module), name, None)):
            return False
        note("runtime._bound_method:instance", f"{type(module).__qualname__}.{name}")
        vars(module)[name] = BoundMethod(function, runtime, module, name)
        return True
