"""Parts of a batch that are the same on all ranks: each rank was given the global batch, and the plan takes it as a part."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence

from vescale.checks._settings import FIRST
from vescale.errors import Coded

__all__ = ["RepeatedParts", "RepeatedPartsWarning"]


class RepeatedPartsWarning(Coded, UserWarning):
    """Ranks that give different parts of a batch (`given="local"`) gave the same values in all of the first forwards."""

    code = "VS0305"


class RepeatedParts:
    """Looks at the first forwards of a model, and warns once, on its first rank."""

    def __init__(self, is_first_rank: bool) -> None:
        self._is_first_rank = is_first_rank
        self._count = 0

    def look(self, names: Sequence[str], keys: Sequence[Hashable], values: Sequence[object]) -> None:
        """``keys``: which part each rank gives; ``values``: what tells all that it gives apart."""
        if self._count < 0 or len(set(keys)) < 2:
            return
        self._count = self._count + 1 if len(set(values)) == 1 else -1
        if self._count == FIRST:
            self._count = -1
            if self._is_first_rank:
                shown = ", ".join(map(repr, names[:4]))
                warnings.warn(
                    RepeatedPartsWarning(
                        f"in {FIRST} forwards all ranks gave the same values as their parts of {shown}: the plan says "
                        'given="local", so that these are taken as different rows of a batch that is as many times larger. '
                        'If every rank reads the global batch, leave given="local" out of the entry; if each has its own '
                        "rows, draw them with vescale.ShardedBatchSampler"
                    ),
                    stacklevel=2,
                )
