"""``PlanError``, with the place to edit."""

from __future__ import annotations

from collections.abc import Iterable

from vescale.errors._coded import Coded
from vescale.errors._source import Source

__all__ = ["MissingMeshError", "PlanError", "PlanMismatchError"]


class PlanError(Coded, ValueError):
    """An invalid plan: what was found, what was expected, and the edit that fixes it, with its source.

    ``source`` is the position of the mistake, if known; ``problem`` is the message without it.
    """

    code = "VS0100"

    def __init__(self, problem: str, source: Source | None = None) -> None:
        super().__init__(f"{source}: {problem}" if source is not None else problem)
        self.problem = problem
        self.source = source


class MissingMeshError(PlanError):
    """A plan file without sizes of its axes was read without a mesh."""

    code = "VS0123"


class PlanMismatchError(PlanError):
    """Ranks are about to run different things; the same error on every rank, before any collective.

    ``ranks``: the global ranks that differ from the majority, or have not come.
    """

    code = "VS0201"

    def __init__(self, problem: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)
