"""The pool of ranks: results in rank order, failures named by rank; a dead or silent rank never hangs the run."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import RankError, RankPools
from vescale.compat.simulated_ranks import fake_world


def _sum_of_ranks(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


def _rank() -> int:
    return dist.get_rank()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def _abort_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(30)


def _estimate() -> int:
    with fake_world(dist.get_world_size(), dist.get_rank()):
        init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    value = torch.ones(1)
    dist.all_reduce(value, group=mesh.get_group("tp"))
    return int(value)


def test_groups_of_another_world_are_not_lent(ranks: RankPools) -> None:
    for _ in range(2):
        assert ranks.run(_estimate, world_size=2) == [2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(ranks: RankPools, world_size: int) -> None:
    assert ranks.run(_rank, world_size=world_size) == list(range(world_size))
    total = sum(range(world_size)) + 5 * world_size
    assert ranks.run(_sum_of_ranks, 5, world_size=world_size) == [total] * world_size


def test_failures_name_the_rank_and_the_next_case_runs(ranks: RankPools) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*ValueError: planted"):
        ranks.run(_fail_on, 1, world_size=2)
    assert ranks.run(_rank, world_size=2) == [0, 1]


def test_a_dead_or_silent_rank_is_reported_and_replaced(ranks: RankPools) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2:\n.* exit code 3"):
        ranks.run(_die_on, 0, world_size=2)
    with pytest.raises(RankError, match=r"rank 1 of 2:\n.* exit code -6(?s:.*)_abort_on"):
        ranks.run(_abort_on, 1, world_size=2)
    with pytest.raises(RankError, match=r"no answer from rank 1(?s:.*)_sleep_on"):
        ranks.run(_sleep_on, 1, world_size=2, timeout=2)
    assert ranks.run(_rank, world_size=2) == [0, 1]


def _make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group([0, 1])
    return os.getpid()


def test_a_pool_with_many_groups_is_replaced(ranks: RankPools) -> None:
    before = ranks.run(_make_groups, 1, world_size=2)
    assert ranks.run(_make_groups, 150, world_size=2) == before
    assert set(ranks.run(_make_groups, 1, world_size=2)).isdisjoint(before)
