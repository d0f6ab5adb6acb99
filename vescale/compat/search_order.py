"""One order of candidates in PyTorch's searches for placements.

PyTorch keeps candidates in sets. The hash of a ``Partial`` is that of a string, which differs between processes (unless
PYTHONHASHSEED is set), and with it the order: where two candidates cost the same, ranks chose different ones, and called
different collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import _decompositions
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor.placement_types import Placement

from vescale.compat.patching import Changes

__all__ = ["search_in_one_order"]


def search_in_one_order(changes: Changes, _: Any) -> None:
    """Candidates that are replicated come first, then shards by dim, then pending sums."""
    strategy: Any = _decompositions.DecompShardingStrategy
    candidates: Any = strategy._get_candidate_placements
    neighbors: Any = single_dim_strategy._get_neighbor_placements

    @functools.wraps(candidates)
    def get_candidate_placements(op_schema: Any) -> Any:
        return sorted(candidates(op_schema), key=_rank_of_all)

    @functools.wraps(neighbors)
    def get_neighbor_placements(shards: Any, partials: Any, *others: Any) -> Any:
        return neighbors(sorted(shards, key=_rank), sorted(partials, key=_rank), *others)

    changes.attribute(strategy, "_get_candidate_placements", staticmethod(get_candidate_placements))
    changes.function(neighbors, get_neighbor_placements)


def _rank(placement: Placement | None) -> tuple[bool, bool, str]:
    return (
        (False, False, "")
        if placement is None
        else (placement.is_partial(), not placement.is_replicate(), str(placement))
    )


def _rank_of_all(placements: Iterable[Placement | None]) -> list[tuple[bool, bool, str]]:
    return [_rank(placement) for placement in placements]
