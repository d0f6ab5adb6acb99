"""Rounds through the store: what everyone said, who did not come, and that nothing of it stays behind."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.ranks import RankPools
from tests.simulate import simulate
from vescale.comm import Consensus
from vescale.comm._consensus import ConsensusError
from vescale.compat import default_store


def rounds() -> int:
    """How many keys 50 rounds of all ranks, and of half of them, leave in the store."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone, half = Consensus(range(world), "test"), Consensus(range(rank % 2, world, 2), "test")
    dist.barrier()
    before = default_store().num_keys()
    dist.barrier()
    for number in range(50):
        message = b"same" if number % 3 else b"of rank %d" % rank
        expected = [message if number % 3 else b"of rank %d" % other for other in range(world)]
        assert everyone.exchange(message, lambda: "test") == expected
        if number % 5 == 0:
            assert half.exchange(message, lambda: "test") == expected[rank % 2 :: 2]
    dist.barrier()
    return default_store().num_keys() - before


def test_rounds_leave_nothing_in_the_store(ranks: RankPools) -> None:
    assert ranks.run(rounds) == [0] * 4
    assert simulate(rounds, 6) == [0] * 6


def absence(late: int) -> None:
    """A rank that comes too late is named to the others, and learns of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    consensus = Consensus(range(world), "late", timedelta(seconds=2))
    store, gave_up = default_store(), f"gave up on {late}"
    dist.barrier()
    if rank == late:
        while store.add(gave_up, 0) < world - 1:
            time.sleep(0.05)
        with pytest.raises(ConsensusError, match="mine"):
            consensus.exchange(b"", lambda: "mine")
    else:
        expected = rf"of rank {rank}.*ranks \[{late}\] did not come"
        with pytest.raises(ConsensusError, match=expected):
            consensus.exchange(b"", lambda: f"of rank {rank}")
        store.add(gave_up, 1)
    dist.barrier()


@pytest.mark.parametrize("late", [0, 2])
def test_absent_ranks_are_named(ranks: RankPools, late: int) -> None:
    ranks.run(absence, late)
