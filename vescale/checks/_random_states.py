"""``RandomStates``: the generators that a program draws from without naming one, which of them a forward has used, and
what for.

Nobody has to seed Python's ``random``, and others draw from it: libraries that are imported, that log a sample of what they
see, and threads. So a draw says nothing by itself. What counts is what the model computes: the functions of its tensors and
the numbers that they are called with.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale.checks._call_site import call_site
from vescale.checks._mismatches import DRAWN, NUMBERS, SEED, USED
from vescale.compat import no_torch_function, tensors_in

__all__ = ["RandomStates", "describe_draw"]


class RandomStates:
    """The states of the default generator of torch, of ``numpy.random`` and of ``random``, as they are now.

    Args:
        names_state: whether ranks that draw have to be in the same state; else, where ranks may have drawn different
            amounts before, of the same seed.
        sees_calls: whether :meth:`see` gets all that the model computes from now on.
    """

    def __init__(self, *, names_state: bool, sees_calls: bool) -> None:
        self._names_state = names_state
        self._calls: int | None = 0 if sees_calls else None
        self._states = _states()

    def see(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """A torch function that the model has called. One that makes no DTensor, of no DTensor, computes nothing of the
        model: a read, a sum of local values."""
        name = getattr(function, "__name__", "")
        if self._calls is None or name in _ALIASES:
            return
        given = [*args, *kwargs.values()]
        makes = name == "__setitem__" or any(isinstance(x, DTensor) for x in tensors_in(result))
        if makes and any(isinstance(x, DTensor) for x in tensors_in(given)):
            self._calls = zlib.crc32(repr((name, *_numbers(given))).encode(), self._calls)

    def drawn_since(self) -> list[tuple[str, str]]:
        """Of the generators that have been drawn from since: name, and what tells where they stood; and of the calls that
        have been seen."""
        names = (SEED, *NUMBERS)
        texts = [f"{state:08x}" for state in self._states]
        texts[0] = f"{torch.initial_seed()}, {texts[0]}" if self._names_state else str(torch.initial_seed())
        drawn = [(name, text) for name, text, state, now in zip(names, texts, self._states, _states()) if state != now]
        return drawn if self._calls is None else [*drawn, (USED, f"{self._calls:08x}")]


_ALIASES = ("__get__", "detach")
"""What gives a tensor with the same values, or an attribute: for a look at it as well as for the model."""


def _numbers(value: Any) -> Iterator[object]:
    """All that a program may have drawn among the arguments of a call."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif isinstance(value, np.ndarray | np.generic):
        yield value.tolist()
    elif isinstance(value, bool | int | float | complex):
        yield value
    elif type(value) is torch.Tensor and not value.ndim and value.is_cpu and not value.is_meta:
        yield value.item()


def describe_draw(shape: Sequence[int], what: str, generator: torch.Generator) -> tuple[str, str]:
    """For :meth:`StepChecks.note`, before ``what`` draws into a DTensor: which numbers are going to be drawn."""
    with no_torch_function():
        state = zlib.crc32(generator.get_state().numpy().tobytes())
    where = f"{DRAWN}what {what} has put into a DTensor of shape {tuple(shape)} ({call_site()})"
    return where, f"the seed {generator.initial_seed()} in state {state:08x}"


def _states() -> tuple[int, int, int]:
    mersenne = np.random.get_state()
    key, position = mersenne[1], mersenne[2]  # type: ignore[index]
    numbers = random.getstate()[1]
    return (
        zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        zlib.crc32(repr(position).encode(), zlib.crc32(np.asarray(key).tobytes())),
        hash(numbers) & 0xFFFFFFFF,
    )
