"""Plans one buffer: from checked arguments to a ``Layout``, once for all groups with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from vescale.buffer._layout import Layout, offsets_in_order
from vescale.buffer._planning_problem import Problem
from vescale.buffer._shard_size_search import search


@dataclass(frozen=True)
class Group:
    """The tensors that share buffers, in elements."""

    numels: tuple[int, ...]
    blocks: tuple[int, ...]
    num_shards: int
    alignment: int
    tensor_alignment: int

    @property
    def problem(self) -> Problem:
        return Problem.normal(self.numels, self.blocks, self.num_shards, self.alignment, self.tensor_alignment)

    def subset(self, tensors: Sequence[int]) -> Group:
        return replace(
            self, numels=tuple(self.numels[i] for i in tensors), blocks=tuple(self.blocks[i] for i in tensors)
        )


@lru_cache(maxsize=512)  # the 61 layers of a model are two or three different groups
def plan_group(group: Group, order: str, cap: int) -> Layout:
    """The smallest layout that the search finds with tables of at most ``cap`` entries."""
    problem = group.problem
    offsets = [0] * len(group.numels)  # also those of empty tensors
    shard = lower_bound = 0
    strategy = "empty"
    if problem.numels:
        found = search(problem, order, cap)
        starts = offsets_in_order(problem.numels, problem.blocks, found.order, found.shard)
        for i, start in zip(problem.source, starts, strict=True):
            offsets[i] = start * problem.unit
        shard, lower_bound, strategy = found.shard * problem.unit, found.lower_bound * problem.unit, found.strategy
    return Layout(
        numels=group.numels,
        blocks=group.blocks,
        num_shards=group.num_shards,
        alignment=group.alignment,
        tensor_alignment=group.tensor_alignment,
        shard_size=shard,
        offsets=tuple(offsets),
        lower_bound=lower_bound,
        strategy=strategy,
    )
