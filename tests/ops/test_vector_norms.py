"""Norms of every order, and gradient clipping with them, equal one device: empty local tensors, every placement."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.ops.layouts import assert_same, data, layouts, place, ragged_layouts, replicated
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.ops import strict_placements
from vescale.placements import RaggedShard

ORDERS = (0, 0.5, 1, 2, 3, -1, -2, math.inf, -math.inf)


def check_norm(order: float, layout: Any, dtype: torch.dtype) -> None:
    full = data().to(dtype)
    x = place(full, layout)
    with strict_placements():
        norms = [
            (torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(full, order)),
            (torch.linalg.vector_norm(x, order, dim=(0, 1), keepdim=True), full.norm(order).view(1, 1)),
            (torch._foreach_norm([x], order)[0], torch._foreach_norm([full], order)[0]),
        ]
        if dtype == torch.bfloat16:
            norms = [(torch.linalg.vector_norm(x, order, dtype=torch.float32), full.float().norm(order))]
    for actual, expected in norms:
        assert all(placement.is_replicate() for placement in actual.placements)
        assert_same(actual, expected)


def on_rank_norms(world: int) -> int:
    cases: list[tuple[Any, ...]] = list(itertools.product(ORDERS, layouts(world), [torch.float32]))
    cases += itertools.product((1, 2, math.inf), layouts(world)[:3], [torch.bfloat16, torch.float64])
    return run_cases(check_norm, cases)


@pytest.mark.parametrize("world", [1, 4])
def test_norms(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_norms, world, world_size=world)


def on_rank_nan(world: int) -> None:
    """A NaN on one rank reaches the norm on all: a maximum by all-reduce would lose it."""
    for layout, order in itertools.product(layouts(world), ORDERS):
        full = data()
        full[-1, -1] = math.nan
        expected = torch.linalg.vector_norm(full, order)
        assert_same(torch.linalg.vector_norm(place(full, layout), order), expected)


def test_nan_is_not_lost(ranks: RankPools) -> None:
    ranks.run(on_rank_nan, 3, world_size=3)


def mixed(world: int) -> list[Any]:
    """One parameter for each placement on a 1-D mesh, stock ones too; the last is empty on all ranks but one."""
    flat = [(mesh, placements) for mesh, placements in layouts(world) if len(mesh) == 1]
    return [*flat, ((world,), (Shard(0),)), ((world,), (Replicate(),)), ((world,), (RaggedShard((), _last(world)),))]


def _last(world: int) -> tuple[int, ...]:
    return tuple(int(rank == world - 1) for rank in range(world))


def check_clipping(order: float, max_norm: float, foreach: bool, world: int) -> None:
    where = mixed(world) if foreach else [layout for layout in mixed(world) if layout[1] != (Shard(0),)]
    ours, theirs = [], []
    for seed, layout in enumerate(where):
        ours.append(torch.nn.Parameter(place(data(seed), layout)))
        theirs.append(torch.nn.Parameter(data(seed)))
        ours[-1].grad, theirs[-1].grad = place(data(seed + 50), layout), data(seed + 50)
    kept = [p.grad.placements for p in ours if p.grad is not None]
    with strict_placements(), record_comms() as comms:
        norm: Any = torch.nn.utils.clip_grad_norm_(ours, max_norm, order, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, order, foreach=foreach)
    if foreach and world > 1:
        assert len(comms.records) <= 1, "one collective for all parameters"
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other, placements in zip(ours, theirs, kept):
        assert one.grad is not None and one.grad.placements == placements
        assert_same(one.grad, other.grad)


def on_rank_clipping(world: int) -> int:
    return run_cases(check_clipping, list(itertools.product(ORDERS, (0.5, 1e6), (True, False), [world])))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clip_grad_norm(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_clipping, world, world_size=world)


def check_empty(order: float, foreach: bool) -> None:
    """A parameter without elements has the norm 0, or none, and brings no other gradient to every rank."""
    mesh = (2,)
    layout = (mesh, (RaggedShard((0,), (1, 3)),))
    ours, theirs = [], []
    for seed, full in enumerate((data(), torch.zeros(0, 5))):
        ours.append(torch.nn.Parameter(place(full, layout)))
        theirs.append(torch.nn.Parameter(full.clone()))
        ours[-1].grad, theirs[-1].grad = place(full + seed, layout), full + seed
    if not 0 <= order < math.inf:
        with pytest.raises(RuntimeError, match=r"norm on (an )?empty tensor"):
            torch.nn.utils.clip_grad_norm_(ours, 0.5, order, foreach=foreach)
        return
    with strict_placements():
        norm: Any = torch.nn.utils.clip_grad_norm_(ours, 0.5, order, foreach=foreach)
        assert_same(torch.linalg.vector_norm(ours[1].detach(), order), torch.zeros(()))
    assert_same(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5, order, foreach=foreach))
    assert ours[0].grad is not None and theirs[0].grad is not None
    assert_same(ours[0].grad, theirs[0].grad)


def on_rank_empty() -> int:
    return run_cases(check_empty, list(itertools.product(ORDERS, (True, False))))


def test_a_parameter_without_elements(ranks: RankPools) -> None:
    ranks.run(on_rank_empty, world_size=2)


def on_rank_clipping_two_axes() -> None:
    """Parameters on 2-D meshes, and on different meshes, in one call."""
    where = [layout for layout in layouts(4) if len(layout[0]) == 2] + ragged_layouts(4)[:1]
    for order in (1.0, 2.0, math.inf):
        ours = [torch.nn.Parameter(place(data(seed), layout)) for seed, layout in enumerate(where)]
        theirs = [torch.nn.Parameter(data(seed)) for seed in range(len(where))]
        for seed, (one, other, layout) in enumerate(zip(ours, theirs, where)):
            one.grad, other.grad = place(data(seed + 9), layout, replicated(layout)), data(seed + 9)
            one.grad = one.grad.redistribute(placements=layout[1])
        same_mesh = len(where) - 1
        norm: Any = torch.nn.utils.clip_grad_norm_(ours[:same_mesh], 0.5, order)
        expected = torch.nn.utils.clip_grad_norm_(theirs[:same_mesh], 0.5, order)
        assert_same(norm, expected)
        norms = torch._foreach_norm([p.grad for p in ours], order)
        for actual, other in zip(norms, torch._foreach_norm([p.grad for p in theirs], order)):
            assert_same(actual, other)
        assert norms[-1].device_mesh.ndim == 1 and norms[0].device_mesh.ndim == 2
        for one, other in zip(ours, theirs):
            assert_same(one.grad, other.grad)


def test_clipping_on_two_axes_and_two_meshes(ranks: RankPools) -> None:
    ranks.run(on_rank_clipping_two_axes, world_size=4)
