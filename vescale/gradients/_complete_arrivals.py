"""``CompleteArrivals``: parameters whose gradients arrive complete, and need no hook that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vescale.compat import ParameterRow
from vescale.gradients._parameter import ReducedParameter

__all__ = ["CompleteArrivals"]

# Each time, hooks are removed and registered anew.
_MAX_MUTINGS = 4


class CompleteArrivals:
    """Mutes the hooks of parameters whose gradients arrive complete, as on a mesh without data parallelism. They are
    looked at when backward ends, which saves a call into Python for each.

    =================================================  ==========================================================
    event                                              hooks
    =================================================  ==========================================================
    a backward ends                                    muted, of parameters whose gradients arrived complete
    a backward begins on top of a gradient,            of this parameter, or of all: called again
    or without synchronization
    at the end, a gradient is not complete             called again; the gradient is taken then
    =================================================  ==========================================================
    """

    def __init__(self) -> None:
        self._found: list[ReducedParameter] = []
        self._muted: list[ReducedParameter] = []
        self._row: ParameterRow | None = None  # of the muted ones
        self._num_mutings = 0

    def begin(self, syncs: bool, may_have: bool) -> None:
        """Called before the first gradient of a backward, when complete gradients have been set aside; ``may_have``: some
        parameters may have gradients, there or aside."""
        self._found.clear()
        if syncs and not may_have:
            return
        others = [r for r in self._muted if not syncs or r.previous is not None or r.parameter.grad is not None]
        for reduced in others:
            self._remove(reduced)
            reduced.notify(True)

    def note(self, reduced: ReducedParameter) -> None:
        """Called when a hook has announced a gradient that is complete."""
        if not reduced.slots and reduced.rule.source is None:  # so that the gradient's spec says that it is complete
            self._found.append(reduced)

    def end(self, take: Callable[[ReducedParameter, Any], None]) -> bool:
        """At the end of a backward, whether there are gradients of muted parameters; ``take`` gets those that are not
        complete."""
        muted, others = self._muted, []
        arrived = bool(muted)
        if muted and not self._row_of_muted().are_complete([reduced.complete_spec for reduced in muted]):
            arrived = self._row_of_muted().have_grads()
            others = [r for r in muted if r.parameter.grad is not None and not r.is_complete_as_before()]
        for reduced in others:
            self._remove(reduced)
            if reduced.hooks is not None:  # it still belongs to the model
                reduced.notify(True)
                take(reduced, reduced.parameter)
        if self._found and self._num_mutings < _MAX_MUTINGS:
            self._num_mutings += 1
            for reduced in self._found:
                reduced.notify(False)
            self._muted += self._found
            self._row = None
        self._found.clear()
        return arrived

    def _remove(self, reduced: ReducedParameter) -> None:
        self._muted.remove(reduced)
        self._row = None

    def _row_of_muted(self) -> ParameterRow:
        if self._row is None:
            self._row = ParameterRow([reduced.parameter for reduced in self._muted])
        return self._row
