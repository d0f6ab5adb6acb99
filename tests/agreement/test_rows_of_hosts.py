"""Ranks on several hosts that wait in collectives which do not pair find it out through the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.agreement.test_round import CountingStore
from vescale.agreement import Apart, PostedOrder
from vescale.agreement import _posted_order as posted_order
from vescale.agreement._posted_order import RowsOfHosts

GATHER, REDUCTION = 0, 1


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[PostedOrder]:
    """Of three ranks, each with memory of its own; what a rank sees of others it need not see for long."""
    store = dist.HashStore()

    @contextlib.contextmanager
    def connection() -> Iterator[dist.Store]:
        yield store

    monkeypatch.setattr(posted_order, "connection", connection)
    monkeypatch.setattr(posted_order, "_SEEN_SECONDS", 0.0)
    monkeypatch.setattr(posted_order, "_DOUBT_SECONDS", 0.0)
    found = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        memory = memoryview(bytearray(3 * posted_order._ROW_BYTES))
        found.append(PostedOrder(range(3), memory, RowsOfHosts("a test", rank, 3)))
    return found


def look(orders: list[PostedOrder], awaited: tuple[tuple[int, ...] | None, ...] = (None,) * 3) -> list[Apart | None]:
    return [order.apart(each, "a backward") for order, each in zip(orders, awaited)]


def test_collectives_that_do_not_pair(orders: list[PostedOrder]) -> None:
    for order in orders:
        assert order.post(GATHER, 64, 1)
    assert look(orders) == look(orders) == [None] * 3, "they may still meet"
    for rank, order in enumerate(orders):
        assert order.post(REDUCTION if rank == 1 else GATHER, 64, 2)
    look(orders)
    found = Apart({0: (GATHER, 64, 2), 1: (REDUCTION, 64, 2), 2: (GATHER, 64, 2)}, {})
    assert look(orders) == look(orders) == [found] * 3


def test_ranks_that_wait_before_a_collective(orders: list[PostedOrder]) -> None:
    for order in orders:
        order.post(GATHER, 64, 1)
    for order in orders[1:]:
        order.post(GATHER, 64, 2)
    awaited = ((1, 2), None, None)
    look(orders, awaited)
    found = Apart(dict.fromkeys((1, 2), (GATHER, 64, 2)), {0: "a backward"})
    assert look(orders, awaited)[1:] == [found] * 2
    orders[0].begin_anew()
    for order in orders[1:]:
        order.begin_anew()
    assert look(orders) == [None] * 3, "what was found is of the turn before"


def test_another_rank_reads_where_the_first_no_longer_waits(
    orders: list[PostedOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, order in enumerate(orders):
        order.post(REDUCTION if rank == 1 else GATHER, 64, 2)
    look(orders[:1])
    monkeypatch.setattr(posted_order, "_LEADER_SECONDS", 0.0)
    assert look(orders[1:]) == [None] * 2
    for _ in range(3):
        found = look(orders[1:])
    assert all(found), found


def test_long_waits_ask_less(orders: list[PostedOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    counting = CountingStore(dist.HashStore())
    monkeypatch.setattr(posted_order, "connection", lambda: contextlib.nullcontext(counting))
    orders[0].post(GATHER, 64, 1)
    for _ in range(60):
        look(orders[:1])
    hosts = orders[0]._hosts
    assert hosts is not None and hosts._number < 30
    assert len(counting.requests) <= hosts._number * (4 + 2)
