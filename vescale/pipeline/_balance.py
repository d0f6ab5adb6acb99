"""``balance="cost"``: stages of consecutive blocks, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from vescale.errors import PipelineCutError
from vescale.pipeline._block_work import block_work
from vescale.plans import PipelineEntry

__all__ = ["balanced_splits", "partition", "state_bytes"]


def balanced_splits(model: nn.Module, entry: PipelineEntry, num_ranks: int) -> list[str]:
    """Names of the blocks before which a stage begins. A block's cost is :func:`block_work`; what comes before the blocks,
    and after them, counts for the first and last.

    Raises PlanError where there are too few blocks, or no cut keeps all ranks under ``entry.memory_gib``.
    """
    per_rank = entry.stages_per_rank or (2 if entry.schedule in ("ZBVZeroBubble", "DualPipeV") else 1)
    num_stages = num_ranks * per_rank
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) >= num_stages]
    if not lists:
        raise PipelineCutError(
            f"pipeline: balance='cost' found no ModuleList of at least {num_stages} blocks; give split_before=",
            entry.source,
        )
    name, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    costs = block_work(model, name, len(blocks))
    sizes = [sum(_own_bytes(m) for m in block.modules()) for block in blocks]
    inside, seen = {id(m) for m in blocks.modules()}, False
    for module in model.modules():
        if id(module) in inside:
            seen = True
        else:
            end = -1 if seen else 0
            sizes[end] += _own_bytes(module)
    limit = float("inf") if entry.memory_gib is None else entry.memory_gib * 2**30 / per_rank
    try:
        starts = partition(costs, num_stages, sizes, limit)
    except ValueError:
        least = partition(sizes, num_stages)
        most = max(sum(sizes[a:b]) for a, b in zip(least, [*least[1:], len(sizes)])) * per_rank / 2**30
        raise PipelineCutError(
            f"pipeline: no cut into {num_stages} stages keeps a rank under memory_gib={entry.memory_gib}: parameters, "
            f"gradients and two states of an optimizer take {most:.3g} GiB on the fullest rank of the most even cut; give "
            f"memory_gib={most * 1.01:.3g} or more, or more ranks along {entry.mesh!r}",
            entry.source,
        ) from None
    return [f"{name}.{start}" if name else str(start) for start in starts[1:]]


def _own_bytes(module: nn.Module) -> int:
    return sum(map(state_bytes, module.parameters(recurse=False)))


def state_bytes(parameter: nn.Parameter) -> int:
    """Of a parameter, its gradient, and two states of an optimizer, such as Adam's.

    Args:
        parameter: a frozen one counts once.
    """
    return parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)


def partition(
    costs: Sequence[float], num_parts: int, sizes: Sequence[float] | None = None, limit: float = float("inf")
) -> list[int]:
    """Where each of ``num_parts`` runs of consecutive items begins, so that the largest sum of costs is as small as
    possible, and no sum of ``sizes`` is over ``limit``.

    Dynamic programming over (parts, items); of equally good ones the one with the earliest beginnings. Raises ValueError
    for fewer items than parts, and where every way is over the limit.

    Args:
        costs: of each item, in order.
    """
    n = len(costs)
    if n < num_parts:
        raise ValueError(f"{n} items in {num_parts} parts; give each part an item")
    sums = [0.0, *itertools.accumulate(costs)]
    held = [0.0, *itertools.accumulate(sizes if sizes is not None else [0] * n)]
    infinite = float("inf")
    best = [[infinite] * (n + 1) for _ in range(num_parts + 1)]
    first = [[0] * (n + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for stop in range(part, n + 1):
            for start in range(part - 1, stop):
                if held[stop] - held[start] > limit:
                    continue
                slowest = max(best[part - 1][start], sums[stop] - sums[start])
                if slowest < best[part][stop]:
                    best[part][stop], first[part][stop] = slowest, start
    if best[num_parts][n] == infinite:
        raise ValueError(f"no {num_parts} runs of {n} items are all under {limit}")
    starts, stop = [], n
    for part in range(num_parts, 0, -1):
        stop = first[part][stop]
        starts.append(stop)
    return starts[::-1]
