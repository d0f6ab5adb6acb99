"""``OneBackward``: backwards of one model whose gradients are reduced run one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from vescale.compat import at_end_of_backward, current_backward
from vescale.errors import GradientError


class OneBackward:
    """The running backward of one model. Two threads would start their collectives in an order that no other rank
    knows, and each would take the other's gradients, or free the parameters that the other one needs.

    This is known on CPUs, where a backward runs on the thread that has called it. Where autograd's own threads run it, one
    thread may run several.
    """

    def __init__(self, device_type: str) -> None:
        self._is_known = device_type == "cpu"
        self._running: Callable[[], _Running | None] = _nothing

    def enter(self, name: Callable[[], str]) -> None:
        """Called inside of a backward of what is called ``name``, before it communicates; later calls, and those outside of
        a backward, do nothing.

        Raises GradientError while another thread runs one that has entered.
        """
        if not self._is_known or current_backward() == -1:
            return
        thread = threading.get_ident()
        with _LOCK:
            running = self._running()
            if running is None:
                # Only the engine holds it, so that it is gone when the backward ends, with or without an exception.
                running = _Running(thread)
                self._running = weakref.ref(running)
                at_end_of_backward(running.end)
        # A backward inside of another one (reentrant activation checkpointing) runs on the same thread.
        if running.thread != thread and running.number != current_backward():
            raise GradientError(
                f"{_name_of(thread)} begins a backward of {name()} while {_name_of(running.thread)} runs one. The "
                "order of their collectives may differ between ranks. Run one backward after the other, in the same "
                "order on every rank, or a single backward of the sum of both losses, which gives the same gradients"
            )


class _Running:
    """A backward, from where it has entered to its end."""

    def __init__(self, thread: int) -> None:
        self.thread, self.number = thread, current_backward()

    def end(self) -> None:
        """Nothing: the engine drops it now."""


def _name_of(thread: int) -> str:
    return next((found.name for found in threading.enumerate() if found.ident == thread), "another thread")


_LOCK = threading.Lock()  # held for microseconds, by no rank while it waits for another


def _nothing() -> None:
    """Stands for a dead weak reference."""
