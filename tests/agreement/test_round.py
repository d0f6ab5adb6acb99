"""Rounds through the store: what everyone said, who did not arrive, and that nothing of it stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import RankPools
from tests.simulate import simulate
from vescale.agreement import PAUSED, Round
from vescale.agreement._round import _Meeting
from vescale.compat import default_store
from vescale.errors import ConsensusError

pytestmark = pytest.mark.waits


def rounds() -> int:
    """How many keys 50 rounds of all ranks, and of half of them, leave in the store."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone, half = Round(range(world), "test"), Round(range(rank % 2, world, 2), "test")
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


def paused() -> None:
    """The time for which ranks are stopped at a breakpoint does not count."""
    consensus = Round(range(dist.get_world_size()), "paused", timedelta(seconds=1), warns=False)
    dist.barrier()
    if dist.get_rank() == 0:
        default_store().add(PAUSED, 1)
        time.sleep(4.0)
    try:
        assert len(consensus.exchange(b"here", lambda: "test")) == dist.get_world_size()
    finally:
        if dist.get_rank() == 0:
            default_store().add(PAUSED, -1)


def test_time_at_a_breakpoint_does_not_count(ranks: RankPools) -> None:
    ranks.run(paused, world_size=2)


def absence(late: int) -> None:
    """A rank that comes too late is named to the others, and learns of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    consensus = Round(range(world), "late", timedelta(seconds=2))
    store, gave_up = default_store(), f"gave up on {late}"
    dist.barrier()
    if rank == late:
        while store.add(gave_up, 0) < world - 1:
            time.sleep(0.05)
        with pytest.raises(ConsensusError, match="mine"):
            consensus.exchange(b"", lambda: "mine")
    else:
        expected = rf"of rank {rank}.*ranks \[{late}\] did not arrive"
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
            Round(range(4), "everyone", limit).exchange(b"", lambda: "the step of all")
        else:
            Round([1, 2, 3], "others", limit).exchange(b"", lambda: "the step of three")
    dist.barrier()
    store, notice = default_store(), f"vescale waits {rank}"
    # A withdrawn notice stays. A rank that learned of the cross wait within 3 s has not posted one.
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


def slow_rounds() -> None:
    """A rank that is late, and in another round until then, is no cross wait."""
    rank = dist.get_rank()
    everyone = Round(range(4), "slow")
    dist.barrier()
    if rank == 1:
        time.sleep(4)
    if rank < 2:
        Round([0, 1], "slow pair").exchange(b"", lambda: "a pair")
    assert everyone.exchange(b"", lambda: "everyone") == [b""] * 4


def test_late_ranks_are_waited_for(ranks: RankPools) -> None:
    ranks.run(slow_rounds)


class CountingStore:
    """Requests of one rank to a store that the threads of a test share."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != "has_extended_api":
            self.requests.append(name)
        return found


class FileLike:
    """A store without lists of its own, as one in a file."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def has_extended_api(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        assert name != "append"
        return getattr(self._store, name)


def round_of(index: int, num_ranks: int, seconds: float = 120) -> Round:
    found = object.__new__(Round)  # without a process group
    found.ranks, found.index, found.timeout = tuple(range(num_ranks)), index, timedelta(seconds=seconds)
    found.warns = True
    found.place = "vescale counted"
    return found


def on_threads(
    num_ranks: int, run: Callable[[_Meeting, int], Any], store: Any = None
) -> tuple[list[Any], list[list[str]]]:
    """What ``run(meeting, index)`` returns, or raises, on each rank, and the requests of each; nothing stays in the store
    of a round that all have come to."""
    store = dist.HashStore() if store is None else store
    counting = [CountingStore(store) for _ in range(num_ranks)]
    found: list[Any] = [None] * num_ranks

    def one(index: int) -> None:
        meeting = _Meeting(round_of(index, num_ranks), counting[index], 0, lambda: "a test")  # type: ignore[arg-type]
        try:
            found[index] = run(meeting, index)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, [each.requests for each in counting]


@pytest.mark.parametrize("num_ranks", [8, 32, 128, 512])
def test_the_requests_of_a_rank_do_not_depend_on_the_number_of_ranks(num_ranks: int) -> None:
    long = [b"%d" % (index % 3) * 500 for index in range(num_ranks)]
    cases: list[tuple[Callable[[_Meeting, int], Any], list[Any], list[int]]] = [
        (lambda meeting, _: meeting.exchange(b"x" * 500), [[b"x" * 500] * num_ranks] * num_ranks, [4, 6]),
        (
            lambda meeting, index: meeting.exchange(b"%d" % index),
            [[b"%d" % index for index in range(num_ranks)]] * num_ranks,
            [6, 9],
        ),
        (lambda meeting, index: meeting.exchange(long[index]), [long] * num_ranks, [10, 17]),
        (
            lambda meeting, index: meeting.lead(lambda: f"{index}", "+".join),
            ["+".join(map(str, range(num_ranks)))] * num_ranks,
            [6, 12],
        ),
    ]
    for run, expected, (usual, most) in cases:
        store = dist.HashStore()
        found, requests = on_threads(num_ranks, run, store)
        assert found == expected
        numbers = sorted(map(len, requests))
        assert numbers[len(numbers) // 2] <= usual and numbers[-1] <= most, (numbers, max(requests, key=len))
        assert sum(numbers) <= (usual + 1) * num_ranks + 2 * most
        assert store.num_keys() == 0


def test_a_store_without_lists() -> None:
    store = FileLike()
    for run, expected in (
        (lambda meeting, index: meeting.exchange(b"%d" % index), [b"0", b"1", b"2"]),
        (lambda meeting, index: meeting.exchange(b"same"), [b"same"] * 3),
        (lambda meeting, index: meeting.lead(lambda: f"{index}", "+".join), "0+1+2"),
    ):
        found, _ = on_threads(3, run, store)
        assert found == [expected] * 3
        assert store.num_keys() == 0


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("leads", [False, True])
def test_what_one_rank_raises_reaches_all(failing: int, leads: bool) -> None:
    begin = time.monotonic()

    def run(meeting: _Meeting, index: int) -> Any:
        def message() -> str:
            if index == failing:
                raise KeyError("mine")
            return "x"

        return meeting.lead(message, lambda _: "") if leads else meeting.exchange(lambda: message().encode())

    found, _ = on_threads(4, run)
    for index, error in enumerate(found):
        if index == failing:
            assert isinstance(error, KeyError)
        else:
            assert isinstance(error, ConsensusError) and error.ranks == (failing,), error
            assert f"a test; rank {failing} has failed: KeyError: 'mine'" in str(error)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_works_for_too_long_is_named(slow: int) -> None:
    """The first one, which makes something of all messages, or another one, which makes its own."""

    def run(meeting: _Meeting, index: int) -> str:
        meeting._limit = timedelta(seconds=0.5)

        def work() -> str:
            time.sleep(1.5 if index == slow != 0 else 0)
            return ""

        def first(messages: Sequence[str]) -> str:
            time.sleep(1.5 if slow == 0 else 0)
            return ""

        return meeting.lead(work, first)

    found, _ = on_threads(4, run)
    assert all(isinstance(error, ConsensusError) and error.ranks == (slow,) for error in found), found


def chained_waits() -> str:
    """Rank 0 waits for rank 1 in a round with it, rank 1 for 2, 2 for 3, and 3 for 0."""
    rank = dist.get_rank()
    limit = timedelta(seconds=60)
    pair = sorted((rank, (rank + 1) % 4))
    dist.barrier()
    with pytest.raises(ConsensusError, match="wait for each other in different places") as caught:
        Round(pair, "chained", limit).exchange(b"", lambda: f"the round of {pair}")
    dist.barrier()
    return str(caught.value)


def test_ranks_that_wait_for_each_other_in_a_circle(ranks: RankPools) -> None:
    for text in ranks.run(chained_waits):
        assert all(f"rank {rank} is at 'the round of" in text for rank in range(4)), text


def failing_block() -> str:
    rank = dist.get_rank()
    with pytest.raises(ValueError if rank == 1 else ConsensusError, match="no such file") as caught:  # noqa: SIM117
        with Round(range(4), "block").together(lambda: "reading files"):
            if rank == 1:
                raise ValueError("no such file")
    with Round(range(4), "block").together(lambda: "reading files"):
        pass
    return str(caught.value)


def test_a_block_that_fails_on_one_rank(ranks: RankPools) -> None:
    texts = ranks.run(failing_block)
    assert all("rank 1 has failed: ValueError: no such file" in text for text in texts[:1] + texts[2:])
