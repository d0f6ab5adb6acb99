"""Ranks that wait in collectives which do not pair find it out through the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.agreement.test_round import CountingStore
from vescale.agreement import Apart, Watch
from vescale.agreement import _watch as module

GATHER, REDUCTION = 0, 1


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Of three ranks in this process; what a rank sees of others it need not see for long."""
    store = dist.HashStore()

    @contextlib.contextmanager
    def connection() -> Iterator[dist.Store]:
        yield store

    monkeypatch.setattr(module, "connection", connection)
    monkeypatch.setattr(module, "_SEEN_SECONDS", 0.0)
    found = [Watch(range(3), "a test", lambda found: RuntimeError(str(found))) for _ in range(3)]
    for watch in found:
        watch._place = "a test"
    return found


def look(
    watches: list[Watch], awaited: tuple[tuple[int, ...] | None, ...] = (None,) * 3, first: int = 0
) -> list[Apart | None]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for rank, (watch, each) in enumerate(zip(watches, awaited), first):
            patch.setattr(dist, "get_rank", lambda rank=rank: rank)
            found.append(watch._apart(each, "a backward"))
    return found


def test_collectives_that_do_not_pair(watches: list[Watch]) -> None:
    for number in range(150):  # more than is kept
        for watch in watches:
            watch.begin(GATHER, 100 + number, number)
    assert look(watches) == look(watches) == [None] * 3, "they may still meet"
    for rank, watch in enumerate(watches):
        watch.begin(GATHER, 64, rank)  # pairs: digests tell
    assert look(watches) == look(watches) == [None] * 3
    for rank, watch in enumerate(watches):
        watch.begin(REDUCTION if rank == 1 else GATHER, 64, 2)
    look(watches)
    look(watches)
    # Named is the first place where units differ.
    found = Apart({rank: (GATHER, 64, rank) for rank in range(3)}, {})
    assert look(watches) == look(watches) == [found] * 3
    for watch in watches:
        watch.begin_anew()
        watch.begin(REDUCTION, 64, 1)
    assert look(watches) == [None] * 3, "what was found is of the turn before"


def test_a_rank_that_may_still_tell_is_waited_for(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that gather different sizes tell each other, after which the program goes on. Where the machine stood still for
    a second while they did, they took each other for stuck, and a process died in its next step."""
    for rank, watch in enumerate(watches):
        watch.begin(GATHER, 64 + 32 * rank, rank)
    for _ in range(4):
        assert look(watches) == [None] * 3
    monkeypatch.setattr(module, "_DOUBT_SECONDS", 0.0)
    assert look(watches)[0] is not None


def test_ranks_that_do_not_wait_are_given_time(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, watch in enumerate(watches):
        watch.begin(REDUCTION if rank == 1 else GATHER, 64, 2)
    look(watches)
    assert look(watches[:1]) == look(watches[:1]) == [None], "others have not posted since"
    monkeypatch.setattr(module, "_DOUBT_SECONDS", 0.0)
    assert look(watches[:1]) != [None]


def test_ranks_that_wait_before_a_collective(watches: list[Watch]) -> None:
    for watch in watches:
        watch.begin(GATHER, 64, 1)
    for watch in watches[1:]:
        watch.begin(GATHER, 64, 2)
    found = Apart(dict.fromkeys((1, 2), (GATHER, 64, 2)), {0: "a backward"})
    assert look(watches, ((1,), None, None)) == look(watches, ((1,), None, None)) == [None] * 3, "not for the third"
    assert look(watches[:2], ((1, 2), None)) == [None] * 2
    look(watches, ((1, 2), None, None))
    assert look(watches, ((1, 2), None, None)) == [found] * 3


def test_ranks_that_work_are_not_stuck(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has waited at a place, and has gone on since, posts no more."""
    for watch in watches[1:]:
        watch.begin(GATHER, 64, 2)
    awaited = ((1, 2), None, None)
    look(watches, awaited)
    monkeypatch.setattr(module, "_GRACE_SECONDS", -1.0)  # the others' posts are old
    assert look(watches[:1], awaited) == look(watches[:1], awaited) == [None]


def test_another_rank_reads_where_the_first_no_longer_waits(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, watch in enumerate(watches):
        watch.begin(REDUCTION if rank == 1 else GATHER, 64, 2)
    look(watches[:1])
    monkeypatch.setattr(module, "_GRACE_SECONDS", -1.0)
    monkeypatch.setattr(module, "_DOUBT_SECONDS", 0.0)
    assert look(watches[1:], first=1) == [None] * 2
    for _ in range(3):
        found = look(watches[1:], first=1)
    assert all(found), found


def test_long_waits_ask_less(watches: list[Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingStore(dist.HashStore())
    monkeypatch.setattr(module, "connection", lambda: contextlib.nullcontext(counting))
    watches[0].begin(GATHER, 64, 1)
    assert not counting.requests, "what begins asks nobody"
    for _ in range(60):
        look(watches[:1])
    assert watches[0]._post < 30
    assert len(counting.requests) <= watches[0]._post * (4 + 2)


def test_nothing_is_begun_after_an_error_that_ends_the_process(
    watches: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was ended by gloo, without a word of the error, when the script had caught it and ran another step."""
    monkeypatch.setattr(module, "_APART", [ZeroDivisionError("ranks wait for each other")])
    with pytest.raises(ZeroDivisionError, match="wait for each other"):
        watches[0].begin(GATHER, 64, 1)
