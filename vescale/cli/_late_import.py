"""``late_scipy``: transformers imports an assignment solver for losses of a few models, which no command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["late_scipy"]

_NAME = "scipy.optimize"


@contextmanager
def late_scipy() -> Iterator[None]:
    """What imports functions of ``scipy.optimize`` inside gets functions that import it (half a second) when they are
    called. Afterwards, and where it has been imported before, imports are as ever."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = sys.modules[_NAME] = _StandIn(_NAME)
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is stand_in:
            del sys.modules[_NAME]


class _StandIn(ModuleType):
    def __getattr__(self, function: str) -> Callable[..., Any]:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            from scipy import optimize

            return getattr(optimize, function)(*args, **kwargs)

        return call
