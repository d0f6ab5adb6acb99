"""``RunningBackward``: whether a backward runs, and its end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from vescale.compat import HookGate, at_end_of_backward

__all__ = ["RunningBackward"]


class RunningBackward:
    """The backward that has reached a reducer's parameters, from its first gradient to its end.

    Attributes:
        current: returns None while no backward runs.
        gate: shut while one runs. For hooks whose only business is to notice the first gradient.

    Args:
        at_end: called when the outermost backward has ended without exception, unless :meth:`forget` was called before.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self.gate = HookGate()
        self.current: Callable[[], object | None] = _nothing
        self._at_end = at_end

    def follow(self) -> None:
        """Inside of a backward: it runs from now on. Called again, its end comes after all that has been arranged since."""
        token = _Token()
        # The engine alone holds the token: it is gone when the backward ends, also by an exception.
        self.current = weakref.ref(token, lambda _: self.gate.open())
        self.gate.shut()
        at_end_of_backward(functools.partial(self._end, token))

    def forget(self) -> None:
        self.current = _nothing
        self.gate.open()

    def _end(self, token: _Token) -> None:
        if self.current() is token:
            self.forget()
            self._at_end()


class _Token:
    """Stands for a backward."""


def _nothing() -> None:
    """What a weak reference to no backward would return."""
