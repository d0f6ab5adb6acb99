"""``balance="cost"``: stages of consecutive blocks, so that the slowest stage is as fast as possible."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from torch import nn

from vescale.errors import PipelineCutError
from vescale.ir import Program
from vescale.pipeline._block_memory import block_memory
from vescale.pipeline._block_work import block_work
from vescale.pipeline._schedule import make_schedule
from vescale.plans import PipelineEntry

__all__ = ["balanced_splits", "blocks_of", "partition", "state_bytes"]


def balanced_splits(model: nn.Module, entry: PipelineEntry, num_ranks: int, program: Program | None) -> list[str]:
    """Names of the blocks before which a stage begins. A block costs what ``entry.costs`` says, or :func:`block_work`;
    what is around the blocks counts for the first and the last.

    Raises PlanError where there are too few blocks, costs of blocks are missing, or no cut keeps all ranks under
    ``entry.memory_gib``.
    """
    per_rank = entry.stages_per_rank or (2 if entry.schedule in ("ZBVZeroBubble", "DualPipeV") else 1)
    num_stages = num_ranks * per_rank
    name = blocks_of(model, num_stages)
    if name is None:
        raise PipelineCutError(
            f"pipeline: balance='cost' found no ModuleList of at least {num_stages} blocks; give split_before=",
            entry.source,
        )
    blocks = model.get_submodule(name)
    number = len(list(blocks.children()))
    costs = block_work(model, name, number) if entry.costs is None else _table(model, name, entry)
    starts = partition(costs, num_stages)
    if entry.memory_gib is not None:
        starts = _within_memory(model, name, entry, program, costs, num_ranks, starts)
    return [f"{name}.{start}" if name else str(start) for start in starts[1:]]


def blocks_of(model: nn.Module, at_least: int = 2) -> str | None:
    """The path of the ModuleList (or Sequential, where there is none) whose blocks have the most parameters."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [(name, m) for name, m in model.named_modules() if isinstance(m, kind) and len(m) >= at_least]
        if found:
            return max(found, key=lambda item: sum(p.numel() for p in item[1].parameters()))[0]
    return None


def _table(model: nn.Module, blocks: str, entry: PipelineEntry) -> list[float]:
    """Costs by block; those of other modules count for the first block or the last."""
    assert entry.costs is not None
    children = [f"{blocks}.{n}" if blocks else n for n, _ in model.get_submodule(blocks).named_children()]
    found: list[float | None] = [None] * len(children)
    around = [0.0, 0.0]
    used, seen = set(), False
    for name, _ in model.named_modules():
        seen = seen or name in children
        for number, (path, cost) in enumerate(entry.costs):
            if name and path.matches(name, timeout=1.0):
                used.add(number)
                block = next((n for n, child in enumerate(children) if f"{name}.".startswith(f"{child}.")), None)
                if block is None:
                    around[seen] += cost
                else:
                    found[block] = (found[block] or 0.0) + cost
    missing = [child for child, cost in zip(children, found) if cost is None]
    unused = [str(path) for number, (path, _) in enumerate(entry.costs) if number not in used]
    if missing or unused:
        problem = f"has no cost for {missing[0]!r}" if missing else f"{unused[0]!r} matches no module of the model"
        raise PipelineCutError(
            f"pipeline: costs {problem}; give each block of {blocks!r} a cost, as vescale.pipeline.measure_costs does",
            entry.source,
        )
    costs = [cost or 0.0 for cost in found]
    costs[0] += around[0]
    costs[-1] += around[1]
    return costs


def _within_memory(
    model: nn.Module,
    name: str,
    entry: PipelineEntry,
    program: Program | None,
    costs: Sequence[float],
    num_ranks: int,
    starts: list[int],
) -> list[int]:
    """``starts`` if they keep each rank under ``entry.memory_gib``, or the best cut that does."""
    assert entry.memory_gib is not None
    num_stages = len(starts)
    blocks = model.get_submodule(name)
    states = [sum(_own_bytes(m) for m in block.modules()) for block in blocks.children()]
    inside, seen = {id(m) for m in blocks.modules()}, False
    for module in model.modules():
        if id(module) in inside:
            seen = True
        else:
            states[-1 if seen else 0] += _own_bytes(module)
    saved = [0.0] * len(states)
    if entry.microbatch_shape is not None:
        saved = block_memory(model, name, len(states), program, *entry.microbatch_shape)
    schedule = make_schedule(entry, num_ranks, num_stages)
    forwards = [schedule.held_forwards(stage) for stage in range(num_stages)]

    def on_ranks(starts: Sequence[int]) -> list[float]:
        found = [0.0] * num_ranks
        for stage, (start, stop) in enumerate(zip(starts, [*starts[1:], len(costs)])):
            found[schedule.rank_of[stage]] += sum(states[start:stop]) + forwards[stage] * sum(saved[start:stop])
        return found

    limit = entry.memory_gib * 2**30
    if max(on_ranks(starts)) <= limit:
        return starts
    per_rank = num_stages // num_ranks
    cuts = []
    for share in (1 / per_rank, *((0.25, 0.4, 0.6, 0.75) if per_rank == 2 else ())):
        # Of two stages on a rank, the one that comes first in the model may take this part of the rank's memory.
        later = 1 - share if per_rank == 2 else share
        limits = [limit * (share if stage < num_stages // 2 else later) for stage in range(num_stages)]
        with contextlib.suppress(ValueError):
            cuts.append(partition(costs, num_stages, states, limits, saved, forwards))
    if not cuts:
        held = " and what forwards hold" if entry.microbatch_shape is not None else ""
        least = partition([a + max(forwards) * b for a, b in zip(states, saved)], num_stages)
        most = max(on_ranks(least)) / 2**30
        raise PipelineCutError(
            f"pipeline: no cut into {num_stages} stages keeps a rank under memory_gib={entry.memory_gib}: parameters, "
            f"gradients and two states of an optimizer{held} take {most:.3g} GiB on the fullest rank of the "
            f"most even cut; give memory_gib={most * 1.01:.3g} or more, or more ranks along {entry.mesh!r}, or checkpoint "
            "entries",
            entry.source,
        )
    return min(cuts, key=lambda cut: max(sum(costs[a:b]) for a, b in zip(cut, [*cut[1:], len(costs)])))


def _own_bytes(module: nn.Module) -> int:
    return sum(map(state_bytes, module.parameters(recurse=False)))


def state_bytes(parameter: nn.Parameter) -> int:
    """Of a parameter, its gradient, and two states of an optimizer, such as Adam's.

    Args:
        parameter: a frozen one counts once.
    """
    return parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)


def partition(
    costs: Sequence[float],
    num_parts: int,
    sizes: Sequence[float] | None = None,
    limits: float | Sequence[float] = float("inf"),
    repeated: Sequence[float] | None = None,
    times: Sequence[float] | None = None,
) -> list[int]:
    """Where each of ``num_parts`` runs of consecutive items begins, so that the largest sum of costs is as small as
    possible, and no sum of ``sizes``, plus ``times`` of the run the sum of ``repeated``, is over the limit.

    Dynamic programming over (parts, items); of equally good ones the one with the earliest beginnings. Raises ValueError
    for fewer items than parts, and where every way is over the limit.

    Args:
        costs: of each item, in order.
        limits: one for all runs, or of each.
        repeated, times: of each item, and of each run.
    """
    n = len(costs)
    if n < num_parts:
        raise ValueError(f"{n} items in {num_parts} parts; give each part an item")
    sums = [0.0, *itertools.accumulate(costs)]
    held = [0.0, *itertools.accumulate(sizes if sizes is not None else [0] * n)]
    again = [0.0, *itertools.accumulate(repeated if repeated is not None else [0] * n)]
    infinite = float("inf")
    best = [[infinite] * (n + 1) for _ in range(num_parts + 1)]
    first = [[0] * (n + 1) for _ in range(num_parts + 1)]
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        limit = limits if isinstance(limits, int | float) else limits[part - 1]
        factor = times[part - 1] if times is not None else 0
        for stop in range(part, n + 1):
            for start in range(part - 1, stop):
                if held[stop] - held[start] + factor * (again[stop] - again[start]) > limit:
                    continue
                slowest = max(best[part - 1][start], sums[stop] - sums[start])
                if slowest < best[part][stop]:
                    best[part][stop], first[part][stop] = slowest, start
    if best[num_parts][n] == infinite:
        raise ValueError(f"no {num_parts} runs of {n} items are all under {limits}")
    starts, stop = [], n
    for part in range(num_parts, 0, -1):
        stop = first[part][stop]
        starts.append(stop)
    return starts[::-1]
