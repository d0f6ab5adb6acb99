"""Which module of a model made an autograd node, by the sequence number of the node."""

from __future__ import annotations

import bisect

from vescale.compat import sequence_number

__all__ = ["MAX_LENGTH", "ModuleTimeline"]

# Backward looks nodes up; nodes of forwards more than this many module entries ago are forgotten.
MAX_LENGTH = 200_000


class ModuleTimeline:
    """The sequence numbers at which the running module of one model changed, and to which module.

    ``csrc/timeline.h`` is the same in C++.
    """

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        self._max_length = max_length
        self._numbers: list[int] = []
        self._paths: list[str | None] = []  # None: outside of the model

    def mark(self, path: str | None) -> None:
        """From now on this thread runs the module at ``path``; None: it has left the model."""
        number = sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._paths[-1] = path
            return
        self._numbers.append(number)
        self._paths.append(path)
        if len(self._numbers) > self._max_length:
            half = self._max_length // 2
            del self._numbers[:half], self._paths[:half]

    def path_of(self, number: int) -> str | None:
        """The module whose forward made the autograd node with sequence number ``number``; None: not of this model."""
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._paths[index] if index >= 0 else None
