"""``OrderMismatchError``: ranks communicate for different units, or models, at one place of their order."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.errors import Coded

__all__ = ["OrderMismatchError"]


class OrderMismatchError(Coded, RuntimeError):
    """Ranks have gathered, or reduced, different units in one place of their order, so that the contents were mixed, or are
    about to do different things.

    ``ranks``: those that differ from the majority.
    """

    code = "VS0701"

    def __init__(self, problem: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)
