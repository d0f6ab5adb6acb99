"""``OrderMismatchError``: ranks communicate for different units, or models, at one place of their order."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.errors import Coded

__all__ = ["OrderMismatchError", "different_modules"]


class OrderMismatchError(Coded, RuntimeError):
    """Ranks have gathered, or reduced, different units in one place of their order, so that the contents were mixed, or wait
    for each other in collectives that do not pair.

    ``ranks``: those that differ from the majority.
    """

    code = "VS0701"

    def __init__(self, problem: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


def different_modules(found: str, ranks: Sequence[int]) -> OrderMismatchError:
    return OrderMismatchError(
        f"ranks have run different modules that fully_shard (or a plan's unit) was given: {found}; a gather is a "
        "collective, and gathers of different modules mix their parameters. Run the same modules in the same order on every "
        "rank: give fully_shard the block that holds the experts, or run every expert on every rank, also with no token",
        ranks,
    )
