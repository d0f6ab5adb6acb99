"""``RandomStates``: the generators that a program draws from without naming one, and which of them a forward has used."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from vescale.checks._call_site import call_site
from vescale.checks._mismatches import DRAWN, NUMBERS, SEED
from vescale.compat import no_torch_function

__all__ = ["RandomStates", "describe_draw"]


class RandomStates:
    """The states of the default generator of torch, of ``numpy.random`` and of ``random``, as they are now.

    Args:
        names_state: whether ranks that draw have to be in the same state; else, where ranks may have drawn different
            amounts before, of the same seed.
    """

    def __init__(self, *, names_state: bool) -> None:
        self._names_state = names_state
        self._states = _states()

    def drawn_since(self) -> list[tuple[str, str]]:
        """Of the generators that have been drawn from since: name, and what tells where they stood."""
        names = (SEED, *NUMBERS)
        texts = [f"{state:08x}" for state in self._states]
        texts[0] = f"{torch.initial_seed()}, {texts[0]}" if self._names_state else str(torch.initial_seed())
        return [(name, text) for name, text, state, now in zip(names, texts, self._states, _states()) if state != now]


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
