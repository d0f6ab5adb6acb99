"""Collectives into given places against a brute-force sum, and the memory that they take on gloo."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.comm.test_collectives import one_device
from tests.ranks import RankPools, run_cases
from vescale.comm import all_gather_into, group_of_ranks, reduce_scatter_into

SMALL, LARGE = 7, (1 << 16) + 3
"""Elements of a piece."""


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return values.to(dtype)


def reduced(size: int, numel: int, dtype: torch.dtype, op: str, at_once: bool, in_place: bool) -> None:
    """Bit by bit, whatever way the pieces take."""
    rank = dist.get_rank()
    if rank >= size:
        return
    group = group_of_ranks(tuple(range(size)))
    rows = [contribution(r, size * numel, dtype) for r in range(size)]
    send = rows[rank].clone()
    out = send.view(size, numel)[rank] if in_place else torch.full((numel,), 99, dtype=dtype)
    reduce_scatter_into(out, send, op, group, at_once=at_once).wait()
    expected = one_device([row.view(size, numel)[rank] for row in rows], op)
    assert torch.equal(out, expected), (out - expected).abs().max()


def gathered(size: int, numel: int, dtype: torch.dtype, in_place: bool) -> None:
    rank = dist.get_rank()
    if rank >= size:
        return
    group = group_of_ranks(tuple(range(size)))
    out = torch.zeros(size * numel, dtype=dtype)
    piece = contribution(rank, numel, dtype)
    if in_place:
        piece = out.view(size, numel)[rank].copy_(piece)
    all_gather_into(out, piece, group).wait()
    assert torch.equal(out, torch.cat([contribution(r, numel, dtype) for r in range(size)]))


def allocated(step: Any) -> int:
    """Bytes that this thread asks for, freed or not: others free what it cannot see."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    assert prof.profiler is not None and prof.profiler.kineto_results is not None
    events = prof.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def memory() -> None:
    """A gather takes none; a reduction the others' contributions but for one, or none: step by step."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    out, send = (torch.ones(count * LARGE, device="cpu") for count in (1, size))
    little = 2000
    assert allocated(lambda: all_gather_into(send, out.fill_(1), group).wait()) < little
    assert allocated(lambda: reduce_scatter_into(out, send, "avg", group, at_once=True).wait()) < little
    found = allocated(lambda: reduce_scatter_into(out, send, "avg", group).wait())
    needed = (size - 2) * 4 * LARGE
    assert needed <= found < needed + little


def run() -> int:
    dtypes, both = (torch.float32, torch.bfloat16, torch.int64), (False, True)
    cases = list(itertools.product((2, 3, 4), (SMALL, LARGE), dtypes, ("sum", "max"), both, both))
    count = run_cases(reduced, cases)
    count += run_cases(
        reduced, [(4, LARGE, torch.float32, "avg", False, False), (1, SMALL, dtypes[0], "sum", True, False)]
    )
    count += run_cases(gathered, list(itertools.product((1, 2, 3, 4), (SMALL, LARGE), dtypes, both)))
    return count + run_cases(memory, [()])


def test_every_way(ranks: RankPools) -> None:
    ranks.run(run, world_size=4)


def test_memory_of_two(ranks: RankPools) -> None:
    ranks.run(memory, world_size=2)
