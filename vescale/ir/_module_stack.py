"""``Running``: what is known of the modules that run at the moment, in a walk on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import nn

__all__ = ["Running"]

_T = TypeVar("_T")


class Running(Generic[_T]):
    """A stack with one value for each watched module whose forward runs; ``outside`` is the value outside of all."""

    def __init__(self, outside: _T) -> None:
        self._notes = [outside]

    @property
    def innermost(self) -> _T:
        return self._notes[-1]

    @contextlib.contextmanager
    def watched(self, module: nn.Module, note: Callable[[_T], _T]) -> Iterator[None]:
        """While open, the module puts up ``note(innermost)``."""

        def leave(*_: object) -> None:  # what a hook returns would be the module's output
            self._notes.pop()

        handles = [
            module.register_forward_pre_hook(lambda *_: self._notes.append(note(self.innermost))),
            module.register_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
