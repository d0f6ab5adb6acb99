"""What ranks must agree on before their collectives match: the parameters of a reducer, and how gradients arrive."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vescale.comm import Consensus, compare_descriptions
from vescale.errors import Coded
from vescale.gradients._reduction import Arrival

__all__ = ["GradientMismatchError", "ObservedArrival", "agree_on_arrivals", "agree_on_parameters"]


class GradientMismatchError(Coded, RuntimeError):
    """The gradients of the ranks differ, so that their collectives would not match."""

    code = "VS0702"


@dataclass(frozen=True)
class ObservedArrival:
    """A gradient that arrived without having a slot: the parameter's index, how it arrived, and how often."""

    index: int
    arrival: Arrival
    count: int


def agree_on_parameters(described: Sequence[tuple[str, str]], what: str, consensus: Consensus) -> None:
    """Compare names and descriptions of the parameters, and the settings of the reducers, on all ranks.

    Raises GradientMismatchError on every rank, naming the first parameter that differs.
    """
    own = {"reducers": [("settings", what)], "parameters": described}
    found = compare_descriptions(own, consensus, lambda: "making a GradientReducer")
    if found is not None:
        raise GradientMismatchError(
            f"{found.text()}; build the same model with the same requires_grad, and the same reducer, on every rank"
        )


def agree_on_arrivals(
    observed: Sequence[ObservedArrival],
    unseen: Sequence[int],
    name_of: Callable[[int], str],
    describe: Callable[[ObservedArrival], str],
    consensus: Consensus,
) -> tuple[list[ObservedArrival], list[int]]:
    """The gradients that need slots on any rank, and the parameters that are ``unseen`` on any rank.

    Each in the order of the first rank that has them; the same on every rank.

    Ranks may use different parameters, but not the same parameter in different ways: this raises GradientMismatchError,
    which names the parameter, on every rank.
    """
    first = f"{name_of(observed[0].index)}.grad comes as {describe(observed[0])} for the first time" if observed else ""

    def about() -> str:
        return first or "no gradient came in this backward"

    payload: Any = [(o.index, o.arrival.placements, o.arrival.dtype, o.count) for o in observed], list(unseen)
    found: dict[int, list[ObservedArrival]] = {}  # of the first rank with each message: others say nothing new
    unseen_anywhere: dict[int, None] = {}
    messages: set[bytes] = set()
    for rank, message in zip(consensus.ranks, consensus.exchange(pickle.dumps(payload), about)):
        if message in messages:
            continue
        messages.add(message)
        rows, indices = pickle.loads(message)
        found[rank] = [
            ObservedArrival(index, Arrival(placements, dtype), count) for index, placements, dtype, count in rows
        ]
        unseen_anywhere.update(dict.fromkeys(indices))
    merged: dict[tuple[int, Arrival], ObservedArrival] = {}
    kinds: dict[int, tuple[int, frozenset[Arrival]]] = {}
    for rank, list_ in found.items():
        own: dict[int, set[Arrival]] = {}
        for item in list_:
            own.setdefault(item.index, set()).add(item.arrival)
            known = merged.get((item.index, item.arrival))
            if known is None or known.count < item.count:
                merged[item.index, item.arrival] = item
        for index, arrivals in own.items():
            other, expected = kinds.setdefault(index, (rank, frozenset(arrivals)))
            if arrivals != expected:
                texts = [
                    " and ".join(sorted(describe(ObservedArrival(index, a, 1)) for a in some))
                    for some in (arrivals, expected)
                ]
                raise GradientMismatchError(
                    f"{name_of(index)}.grad comes as {texts[0]} on rank {rank}, and as {texts[1]} on rank {other}; run the "
                    "same model code on inputs that are placed alike on every rank"
                )
    return list(merged.values()), list(unseen_anywhere)
