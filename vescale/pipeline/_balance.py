"""``balance="cost"``: stages of consecutive blocks, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vescale.plans import PipelineEntry, PlanError

__all__ = ["balanced_splits", "partition"]


def balanced_splits(model: nn.Module, entry: PipelineEntry, num_ranks: int) -> list[str]:
    """Names of the blocks before which a stage begins. A block's cost is the number of its parameters that multiply, which
    is what its matmuls cost for a token; what comes before the blocks, and after them, counts for the first and last."""
    per_rank = entry.stages_per_rank or (2 if entry.schedule in ("ZBVZeroBubble", "DualPipeV") else 1)
    num_stages = num_ranks * per_rank
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) >= num_stages]
    if not lists:
        raise PlanError(
            f"pipeline: balance='cost' found no ModuleList of at least {num_stages} blocks; give split_before=",
            entry.source,
        )
    name, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    costs = [_cost(block) for block in blocks]
    inside, before, after, seen = {id(m) for m in blocks.modules()}, 0, 0, False
    for module in model.modules():
        if id(module) in inside:
            seen = True
        elif seen:
            after += _own_cost(module)
        else:
            before += _own_cost(module)
    costs[0] += before
    costs[-1] += after
    starts = partition(costs, num_stages)
    return [f"{name}.{start}" if name else str(start) for start in starts[1:]]


def _own_cost(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):  # looked up, not multiplied
        return 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)


def _cost(module: nn.Module) -> int:
    return sum(_own_cost(m) for m in module.modules()) or 1


def partition(costs: Sequence[float], num_parts: int) -> list[int]:
    """Where each of ``num_parts`` runs of consecutive items begins, so that the largest sum is as small as possible.

    Dynamic programming over (parts, items); of equally good ones the one with the earliest beginnings. Raises ValueError
    for fewer items than parts.
    """
    n = len(costs)
    if n < num_parts:
        raise ValueError(f"{n} items in {num_parts} parts; give each part an item")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    infinite = float("inf")
    best = [[infinite] * (n + 1) for _ in range(num_parts + 1)]
    first = [[0] * (n + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for stop in range(part, n + 1):
            for start in range(part - 1, stop):
                slowest = max(best[part - 1][start], sums[stop] - sums[start])
                if slowest < best[part][stop]:
                    best[part][stop], first[part][stop] = slowest, start
    starts, stop = [], n
    for part in range(num_parts, 0, -1):
        stop = first[part][stop]
        starts.append(stop)
    return starts[::-1]
