"""What an ``OrderMismatchError`` says: ranks communicate for different units, or models, at one place of their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vescale.agreement import Apart
from vescale.errors import OrderMismatchError

GATHER, REDUCTION, COMPARISON, END_OF_BACKWARD, KEPT_GATHER = range(5)
_KINDS = (
    "a gather of",
    "a reduction of",
    "the comparison of gathers",
    "the end of the backward",
    "a gather of pieces of",
)


def different_modules(found: str, ranks: Sequence[int]) -> OrderMismatchError:
    return OrderMismatchError(
        f"ranks have run different modules to which fully_shard (or a plan's unit) applies: {found}; a gather is a "
        "collective, so that gathers of different modules would mix their parameters. Run the same modules in the "
        "same order on every rank: apply fully_shard to the block that holds the experts, or run every expert on "
        "every rank, even without tokens",
        ranks,
    )


def waiting_ranks(found: Apart, path: Callable[[int], str]) -> OrderMismatchError:
    """Of ranks that wait for each other; ``path``: of a unit, by its number."""
    texts = dict(found.texts)
    for rank, (kind, num_bytes, unit) in found.entries.items():
        of = f" {path(unit)} ({num_bytes} bytes)" if kind in (GATHER, REDUCTION, KEPT_GATHER) else ""
        texts[rank] = f"{_KINDS[kind]}{of}"
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks_of.setdefault(texts[rank], []).append(rank)
    text = " and ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} in {text}"
        for text, ranks in ranks_of.items()
    )
    first = next(iter(found.entries.values()))
    minority = [rank for rank, entry in found.entries.items() if entry != first]
    return different_modules(f"they wait for each other, {text}", sorted(found.texts) or minority)
