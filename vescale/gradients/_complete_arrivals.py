"""``CompleteArrivals``: parameters whose gradients arrive complete, and need no hook that says so."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, spec_of
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
        self._num_mutings = 0

    def begin(self, syncs: bool) -> None:
        """Called before the first gradient of a backward, when gradients of earlier ones have been set aside."""
        self._found.clear()
        others = [r for r in self._muted if not syncs or r.previous is not None or r.parameter.grad is not None]
        for reduced in others:
            self._muted.remove(reduced)
            reduced.notify(True)

    def note(self, reduced: ReducedParameter) -> None:
        """Called when a hook has announced a gradient that is complete."""
        if not reduced.slots and reduced.rule.source is None:  # so that the gradient's spec says that it is complete
            self._found.append(reduced)

    def end(self, take: Callable[[ReducedParameter, Any], None]) -> bool:
        """At the end of a backward, whether there are gradients of muted parameters; ``take`` gets those that are not
        complete."""
        muted, others = self._muted, []
        grads = [reduced.parameter.grad for reduced in muted]
        arrived = any(grad is not None for grad in grads)
        if not _are_complete(muted, grads):
            others = [r for r in muted if r.parameter.grad is not None and not r.is_complete_as_before()]
        for reduced in others:
            muted.remove(reduced)
            if reduced.hooks is not None:  # it still belongs to the model
                reduced.notify(True)
                take(reduced, reduced.parameter)
        if self._found and self._num_mutings < _MAX_MUTINGS:
            self._num_mutings += 1
            for reduced in self._found:
                reduced.notify(False)
            self._muted += self._found
        self._found.clear()
        return arrived


def _are_complete(muted: Sequence[ReducedParameter], grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether all gradients have the specs of those that were complete before: the usual case, in few calls."""
    if set(map(type, grads)) != {DTensor}:
        return False
    dtensors = [grad for grad in grads if isinstance(grad, DTensor)]
    return (
        all(map(operator.is_, map(spec_of, dtensors), [reduced.complete_spec for reduced in muted]))
        and {type(local_of(grad)) for grad in dtensors} == {torch.Tensor}
        and not any(grad.requires_grad for grad in dtensors)
    )
