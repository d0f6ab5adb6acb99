"""Values that a forward reads from its batch (``if mask.all()``, ``lengths.max().item()``): in each micro-batch those of the
whole batch, so that its forward takes the branches that one device takes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_READS = {
    getattr(torch.Tensor, name)
    for name in ("__bool__", "__int__", "__float__", "__index__", "__contains__")
    + ("item", "is_nonzero", "equal", "allclose")
} | {torch.is_nonzero, torch.equal, torch.allclose}


_DISTRIBUTIONS, _PACKAGE = os.path.dirname(torch.distributions.__file__), os.path.dirname(os.path.dirname(__file__))


def _validates() -> bool:
    """Whether ``torch.distributions`` checks its arguments: in a trace, they are right."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame is not None and os.path.dirname(frame.f_code.co_filename) == _DISTRIBUTIONS


class Place(NamedTuple):
    """The ``number``-th read inside of call ``call`` of a gated module (-1: outside of them)."""

    call: int
    number: int


class ReadCalls(TorchFunctionMode):
    """Answers reads from ``answers``, by place.

    Args:
        call: the number of the call of a gated module that runs, -1 outside.
        note: called with each read: its place, function, arguments and value.
    """

    def __init__(
        self,
        call: Callable[[], int],
        answers: Mapping[Place, Any],
        note: Callable[[Place, Any, Any, Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._call, self._answers, self._note = call, answers, note
        self.counts: Counter[int] = Counter()

    def end(self) -> None:
        """Hold what was given no longer: it may hold this."""
        self._call, self._note = lambda: -1, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _READS:
            return func(*args, **kwargs)
        call = self._call()
        place = Place(call, self.counts[call])
        self.counts[call] += 1
        if self._note is not None and args[0].is_meta and _validates():
            return True
        value = self._answers[place] if place in self._answers else func(*args, **kwargs)
        if self._note is not None:
            self._note(place, func, args, kwargs, value)
        return value


@dataclass(frozen=True)
class BatchReads:
    """The reads of one trace.

    Attributes:
        counts: how many there are, inside of which call.
        values: of the traced batch, those that depend on it alone.
        compute: the same of another batch of the same shapes.
        sizes: how much masks and the like have chosen, which calls may have taken as numbers; ``choose``: the same of
            another batch, None if that cannot be computed with these sizes.
    """

    counts: Mapping[int, int]
    values: Mapping[Place, Any]
    compute: Callable[[Mapping[str, Any]], dict[Place, Any]]
    sizes: Sequence[Any] = ()
    choose: Callable[[Mapping[str, Any]], Sequence[Any] | None] = lambda _: ()

    @property
    def branches(self) -> dict[Place, Any]:
        """Those that are no floating-point numbers, of which forwards make branches and sizes."""
        return {place: value for place, value in self.values.items() if not isinstance(value, float)}
