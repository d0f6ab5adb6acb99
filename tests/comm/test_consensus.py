"""Rounds through the store: what everyone said, who did not come, and that nothing of it stays behind."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import RankPools
from tests.simulate import simulate
from vescale.comm import Consensus
from vescale.comm._rank_comparison import ConsensusError, WaitNotice
from vescale.compat import default_store

pytestmark = pytest.mark.waits


def rounds() -> int:
    """How many keys 50 rounds of all ranks, and of half of them, leave in the store."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone, half = Consensus(range(world), "test"), Consensus(range(rank % 2, world, 2), "test")
    dist.barrier()
    before = num_keys()
    dist.barrier()
    for number in range(50):
        message = b"same" if number % 3 else b"of rank %d" % rank
        expected = [message if number % 3 else b"of rank %d" % other for other in range(world)]
        assert everyone.exchange(message, lambda: "test") == expected
        if number % 5 == 0:
            assert half.exchange(message, lambda: "test") == expected[rank % 2 :: 2]
    dist.barrier()
    return num_keys() - before


def num_keys() -> int:
    """But for the notices of ranks that have waited for seconds."""
    store = default_store()
    return store.num_keys() - sum(store.check([f"vescale waits {rank}"]) for rank in range(dist.get_world_size()))


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


def cross_waits() -> tuple[str, float]:
    """Ranks 0 and 1 compare something with all, ranks 2 and 3 with each other first, which rank 1 should join."""
    rank = dist.get_rank()
    dist.barrier()
    start = time.monotonic()
    limit = timedelta(seconds=60)
    with pytest.raises(ConsensusError) as caught:
        if rank < 2:
            Consensus(range(4), "everyone", limit).exchange(b"", lambda: "the step of all")
        else:
            Consensus([1, 2, 3], "others", limit).exchange(b"", lambda: "the step of three")
    dist.barrier()
    store, notice = default_store(), f"vescale waits {rank}"
    # A withdrawn notice stays, see WaitNotice. A rank that learned of the cross wait within 3 s has not posted one.
    assert not store.check([notice]) or store.get(notice) == b""
    return str(caught.value), time.monotonic() - start


def test_ranks_that_wait_for_each_other_end_early(ranks: RankPools) -> None:
    """Both groups are told who is where, long before the time limit."""
    found = ranks.run(cross_waits)
    for text, seconds in found:
        assert "wait for each other in different places" in text and seconds < 30, text
        assert "at 'the step of all' with ranks [0, 1, 2, 3]" in text, text
        assert "at 'the step of three' with ranks [1, 2, 3]" in text, text
    assert found[0][0] == found[1][0] and found[2][0] == found[3][0]


def test_a_notice_that_is_withdrawn_while_it_is_read() -> None:
    """The other rank goes on just then: this one waited for its notice until the timeout of the store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    other = WaitNotice(store, 1, "elsewhere", [1, 2])
    assert other.cross_wait({2: "key of 2"}) == ""

    class Withdrawing:
        def check(self, keys: list[str]) -> bool:
            found = store.check(keys)
            if keys == ["vescale waits 1"]:
                other.withdraw()
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    assert WaitNotice(Withdrawing(), 0, "here", [0, 1]).cross_wait({1: "key of 1"}) == ""  # type: ignore[arg-type]


def slow_rounds() -> None:
    """A rank that is late, and in another round until then, is no cross wait."""
    rank = dist.get_rank()
    everyone = Consensus(range(4), "slow")
    dist.barrier()
    if rank == 1:
        time.sleep(4)
    if rank < 2:
        Consensus([0, 1], "slow pair").exchange(b"", lambda: "a pair")
    assert everyone.exchange(b"", lambda: "everyone") == [b""] * 4


def test_late_ranks_are_waited_for(ranks: RankPools) -> None:
    ranks.run(slow_rounds)
