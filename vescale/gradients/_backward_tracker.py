"""``BackwardTracker``: whether a backward is running, and a callback at its end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from vescale.compat import HookGate, at_end_of_backward

__all__ = ["BackwardTracker"]


class BackwardTracker:
    """The backward that has reached some parameters, from its first gradient to its end.

    Attributes:
        current: a callable that returns None while no backward is running.
        gate: shut for one that is running; for hooks that only have to detect its first gradient.

    Args:
        at_end: called when the outermost backward has ended without an exception, unless :meth:`forget` was called before.
        at_exception: called when an exception has ended it, likewise.
    """

    def __init__(self, at_end: Callable[[], None], at_exception: Callable[[], None] = lambda: None) -> None:
        self.gate = HookGate()
        self.current: Callable[[], object | None] = _nothing
        self._at_end, self._at_exception = at_end, at_exception

    def follow(self) -> None:
        """Called inside a backward: mark it as running. A second call moves ``at_end`` behind everything that has been
        queued for the end of the backward since."""
        token = _Token()
        # Only the engine holds the token, which is therefore gone when the backward ends, with or without an exception.
        self.current = weakref.ref(token, self._is_over)
        self.gate.shut_here()
        at_end_of_backward(functools.partial(self._end, token))

    def forget(self) -> None:
        self.current = _nothing
        self.gate.open()

    def _is_over(self, token: object) -> None:
        self.gate.open()
        if self.current is token:  # neither at its end nor forgotten
            self._at_exception()

    def _end(self, token: _Token) -> None:
        if self.current() is token:
            self.forget()
            self._at_end()


class _Token:
    """Represents one backward."""


def _nothing() -> None:
    """Stands for a dead weak reference."""
