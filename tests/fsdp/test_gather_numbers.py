"""Ranks that gather and reduce different numbers of units: on one host, all raise, and their processes end."""

from __future__ import annotations

import mmap
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.debug.jobs import JobResult, run_job, run_processes
from tests.device import device_type
from tests.fsdp.test_gather_order import DIFFERENT, EQUAL, Mixture, X, made
from tests.ranks import RankPools
from tests.runtime.zero import sharded_at_rest
from vescale import Plan, parallelize
from vescale.agreement import Apart, PostedOrder
from vescale.agreement import _posted_order as posted_order
from vescale.errors import OrderMismatchError
from vescale.gradients import _order_watch
from vescale.gradients._collective_order import _MARK, GatherSizes

GATHER, REDUCTION, END_OF_BACKWARD = 0, 1, 3


def orders(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> list[PostedOrder]:
    """Of all ranks, in this process; what a rank sees of others it need not see for long."""
    monkeypatch.setattr(posted_order, "_SEEN_SECONDS", 0.0)
    memory, found = memoryview(bytearray(posted_order._ROW_BYTES * num_ranks)), []
    for rank in range(num_ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        found.append(PostedOrder(range(num_ranks), memory))
    return found


def looks(order: PostedOrder, awaited: tuple[int, ...] | None = None, what: str = "a collective") -> Apart | None:
    order.apart(awaited, what)
    return order.apart(awaited, what)


def test_collectives_that_do_not_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = orders(monkeypatch, 3)
    for _ in range(3):  # more than the ring holds
        for number in range(50):
            for order in (first, second, third):
                assert order.post(GATHER, 100 + number, number)
    first.post(GATHER, 64, 1)
    second.post(GATHER, 64, 2)  # pairs: digests tell
    second.post(GATHER, 64, 3)
    assert looks(third) is None
    third.post(GATHER, 64, 1)
    assert [looks(order) for order in (first, second, third)] == [None] * 3, "they may still meet"
    assert not first.post(REDUCTION, 64, 1), "a message of another size would end the process"
    for order in (first, second):
        order.apart(None, "")
    assert third.apart(None, "") is None, "third has not come"
    third.post(REDUCTION, 64, 1)
    monkeypatch.setattr(posted_order, "_DOUBT_SECONDS", 0.0)
    entries = {0: (GATHER, 64, 1), 1: (GATHER, 64, 2), 2: (GATHER, 64, 1)}
    assert [looks(order) for order in (first, second, third)] == [Apart(entries, {})] * 3
    for order in (first, second):
        order.begin_anew()
    assert looks(first) is None and looks(third) is None, "third has not begun anew"
    third.begin_anew()
    for order in (first, second, third):
        order.post(REDUCTION, 64, 1)
    assert looks(first) is None


def test_iterations_that_differ_are_not_all_remembered() -> None:
    """Each iteration gathers a unit that no iteration before it has gathered."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        sizes, device = GatherSizes(dist.group.WORLD), torch.device("cpu")
        for iteration in range(40_000):
            assert sizes.agree(iteration, 8, device) and sizes.agree(iteration, 4, device)
            sizes.begin()
        assert len(sizes._next) < 70_000
    finally:
        dist.destroy_process_group()


def test_after_an_error_ranks_agree_on_sizes_anew() -> None:
    """They may have gathered different units since the last comparison, and remember different sizes."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        sizes, asked = GatherSizes(dist.group.WORLD), []
        sizes._consensus = SimpleNamespace(have_all_come=lambda moment, wanted: not asked.append(wanted))  # type: ignore
        for has_raised in (False, False, True):
            for num_bytes in (64, 128):
                assert sizes.agree(1, num_bytes, torch.device("cpu"))
            (sizes.begin_after_error if has_raised else sizes.begin)()
            asked.clear()
        assert sizes.agree(1, 64, torch.device("cpu")) and len(asked) == 1
    finally:
        dist.destroy_process_group()


def test_a_collective_that_does_not_pair_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend would end the process."""
    first, second = orders(monkeypatch, 2)
    monkeypatch.setattr(posted_order, "_DOUBT_SECONDS", 0.0)
    monkeypatch.setattr(_order_watch, "end_soon", lambda: None)
    monkeypatch.setattr(PostedOrder, "wait_until_all_have_found_it", lambda order: None)
    second.post(REDUCTION, 64, 2)
    second.apart(None, "a collective")
    told: list[OrderMismatchError] = []
    watch = _order_watch.OrderWatch(None, str, told.append)  # type: ignore[arg-type]
    watch._posted = first
    with pytest.raises(OrderMismatchError, match="they wait for each other"):
        watch.post(GATHER, 64, 1)
    assert len(told) == 1


def test_a_rank_that_may_still_tell_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that gather different sizes tell each other, after which the program goes on. Where the machine stood still for
    a second while they did, they took each other for stuck, and a process died in its next step."""
    first, second = orders(monkeypatch, 2)
    first.post(GATHER, 64, 1)
    second.post(GATHER, 96, 2)
    assert looks(first) is None
    second.apart(None, "a collective")
    assert looks(first) is None
    monkeypatch.setattr(posted_order, "_DOUBT_SECONDS", 0.0)
    assert looks(first) is not None


def test_ranks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = orders(monkeypatch, 3)
    monkeypatch.setattr(posted_order, "_DOUBT_SECONDS", 0.0)
    for order in (first, second, third):
        order.post(GATHER, 64, 1)
    for order in (second, third):
        order.post(GATHER, 64, 2)
    assert looks(first, (1, 2), "a backward") is None, "others work"
    assert looks(second) is None
    third.apart(None, "a collective")
    found = Apart(dict.fromkeys((1, 2), (GATHER, 64, 2)), {0: "a backward"})
    assert [looks(first, (1, 2), "a backward"), looks(second), looks(third)] == [found] * 3
    assert looks(first, (1,), "a backward") is None, "it does not wait for the third"
    assert looks(first, (1, 2), "a backward") is not None
    first.post(GATHER, 64, 2)
    assert [looks(order) for order in (first, second, third)] == [None] * 3


def different_numbers(widths: tuple[int, ...], options: dict[str, Any], what: str) -> None:
    """Ranks would wait for each other in different collectives: a gather, a reduction, the end of a step."""
    first = dist.get_rank() == 0
    model, _ = made(widths, **options)
    model(X, (0, 1)).backward()
    few, more = (0,), (0, 1)
    if what == "forward":
        model(X, few if first else more).backward()
    elif what == "later":
        (model(X, (0, 1)) + model(X, (1, 0) if first else (2, 1))).backward()
    elif what == "evaluation":
        with torch.no_grad():
            model(X, more if first else few)
    else:
        model.set_requires_gradient_sync(False)
        model(X, few if first else more).backward()
        model.set_requires_gradient_sync(True)
        model(X, few).backward()


def different_numbers_of_replicas(widths: tuple[int, ...]) -> None:
    """The ranks of each shard group run the same units, and those of the other group others."""
    model, _ = made(widths, 2)
    model(X, (0, 1)).backward()
    model(X, (0,) if dist.get_rank() < 2 else (0, 1)).backward()


def posts_of_replicas() -> None:
    """Reductions, and the end of a backward, are posted among all ranks, gathers among those that shard."""
    posted: dict[tuple[int, ...], list[int]] = {}
    post = PostedOrder.post

    def noted(order: PostedOrder, kind: int, num_bytes: int, unit: int) -> bool:
        posted.setdefault(order.ranks, []).append(kind)
        return post(order, kind, num_bytes, unit)

    model, _ = made(EQUAL, 2)
    model(X, (0,)).backward()
    PostedOrder.post = noted  # type: ignore[method-assign]
    try:
        model(X, (0,)).backward()
        model.set_requires_all_reduce(False)
        model(X, (0,)).backward()
    finally:
        PostedOrder.post = post  # type: ignore[method-assign]
    along = tuple(rank for rank in range(4) if rank // 2 == dist.get_rank() // 2)
    assert posted[0, 1, 2, 3] == [REDUCTION, REDUCTION, END_OF_BACKWARD]
    assert GATHER in posted[along] and posted[along].count(REDUCTION) == 4


def test_posts_of_replicas(ranks: RankPools) -> None:
    ranks.run(posts_of_replicas, world_size=4)


def all_raise(result: JobResult, *texts: str) -> None:
    assert result.codes == [1] * len(result.codes), result.text
    for output in result.outputs:
        assert "OrderMismatchError" in output and all(text in output for text in texts), result.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "check", "num_ranks", "what", "options"),
    [
        (EQUAL, "", 2, "forward", {}),
        (EQUAL, "off", 2, "forward", {}),
        (DIFFERENT, "", 3, "forward", {}),
        (EQUAL, "off", 2, "later", {"reshard_after_forward": False}),
        (EQUAL, "off", 3, "later", {"reshard_after_forward": False}),
        (EQUAL, "", 2, "evaluation", {}),
        (DIFFERENT, "", 2, "accumulation", {}),
        (EQUAL, "off", 4, "forward", {"reshard_after_forward": 2}),
    ],
)
def test_different_numbers(
    tmp_path: Path, widths: tuple[int, ...], check: str, num_ranks: int, what: str, options: dict[str, Any]
) -> None:
    env = {"VESCALE_CHECK": check}
    all_raise(run_job(different_numbers, tmp_path, widths, options, what, world_size=num_ranks, env=env), "experts.")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "evaluation"])
def test_different_numbers_on_several_hosts(tmp_path: Path, what: str) -> None:
    """Ranks that wait tell each other through the store where they are."""
    env = {"VESCALE_CHECK": "off", "NUM_HOSTS": "2"}
    result = run_job(different_numbers, tmp_path, EQUAL, {}, what, world_size=2, env=env)
    all_raise(result, "experts.")
    assert result.seconds < 30, result.seconds


@pytest.mark.slow
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_different_numbers_of_replicas(tmp_path: Path, widths: tuple[int, ...]) -> None:
    result = run_job(different_numbers_of_replicas, tmp_path, widths, world_size=4)
    all_raise(result, "ranks 0, 1 in a reduction of experts.0", "ranks 2, 3 in a reduction of experts.1")


def one_shard_group_differs(widths: tuple[int, ...], what: str) -> None:
    rank = dist.get_rank()
    model, _ = made(widths, 2)
    model(X, (0, 1)).backward()
    other = (1, 0) if what == "order" else (0, 1, 2)
    model(X, other if rank == 3 else (0, 1)).backward()


@pytest.mark.slow
@pytest.mark.parametrize("check", ["", "off"])
@pytest.mark.parametrize(("widths", "what"), [(DIFFERENT, "order"), (EQUAL, "number")])
def test_one_shard_group_differs(tmp_path: Path, widths: tuple[int, ...], what: str, check: str) -> None:
    """Its processes end, and its replicas raise what they have raised."""
    result = run_job(one_shard_group_differs, tmp_path, widths, what, world_size=4, env={"VESCALE_CHECK": check})
    all_raise(result, "experts.", "rank 2", "rank 3")


def destroys_at_its_end() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    begin = time.monotonic()
    try:
        different_numbers(EQUAL, {}, "forward")
    finally:
        print(f"raised after {time.monotonic() - begin:.0f} s", file=sys.stderr)
        dist.destroy_process_group()  # waits for what has begun


@pytest.mark.slow
def test_a_process_ends_that_destroys_its_group(tmp_path: Path) -> None:
    result = run_processes(destroys_at_its_end, tmp_path, world_size=2)
    assert result.codes == [1, 1] and "raised after" in result.text, result.text


class Routed(Mixture):
    """Chooses by itself, as a router does: the arguments of the ranks do not differ."""

    chosen: tuple[int, ...] = (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, self.chosen)


def different_numbers_of_a_plan(mode: str) -> None:
    """One rank comes to its backward, which the ranks of a model compare, while another one gathers."""
    torch.manual_seed(0)
    model = Routed(EQUAL).double()
    parallelize(model, sharded_at_rest(Plan(init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))), mode=mode)
    x = X.double()
    for _ in range(2):
        model(x).backward()
    model.chosen = (0,) if dist.get_rank() == 0 else (0, 1)
    model(x).backward()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_different_numbers_of_units_of_a_plan(tmp_path: Path, mode: str) -> None:
    all_raise(run_job(different_numbers_of_a_plan, tmp_path, mode, world_size=2), "experts.1", "rank 0", "rank 1")


def comes_late(check: str) -> None:
    """Steps of which one rank or the other begins each part seconds later raise nothing, and are right."""
    rank = dist.get_rank()
    model, one = made(DIFFERENT)
    for turn in range(2):
        for chosen in ((0, 1), (2,)):
            time.sleep(4 if rank == turn else 0)
            loss = model(X, chosen)
            time.sleep(4 if rank != turn else 0)
            loss.backward()
            assert torch.equal(loss, one(X, chosen))
        with torch.no_grad():
            time.sleep(4 if rank == turn else 0)
            model(X, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("check", ["", "off"])
def test_late_ranks_are_waited_for(tmp_path: Path, check: str) -> None:
    result = run_job(comes_late, tmp_path, check, world_size=2, limit=60.0, env={"VESCALE_CHECK": check})
    assert result.codes == [0, 0], result.text


def read_while_another_rank_posts(path: str) -> int:
    """Return how many entries had a number, but not yet their content, when rank 1 read them."""
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))
    order = PostedOrder((0, 1), memory)
    if dist.get_rank() == 0:
        for number in range(1, 100_001):
            order.post(1, number, number)
        memory[-1] = 1
        return 0
    incomplete = 0
    while not memory[-1]:
        number = struct.unpack_from("Q", memory)[0] + 1
        for _ in range(5):
            found = struct.unpack_from("3Q", memory, order._place(0, number))
            incomplete += found[0] == number and found[2] < number
    return incomplete


def test_an_entry_that_has_its_number_is_complete(ranks: RankPools, tmp_path: Path) -> None:
    """A rank that read the number of an entry before its content took the collective for another one, and waited 30 s."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(2 * 4096))
    assert ranks.run(read_while_another_rank_posts, str(path), world_size=2) == [0, 0]


@pytest.mark.parametrize("num_ranks", [1, 3, 64, 65, 1000])
@pytest.mark.parametrize("stride", [16, 17, 64])
def test_notices_of_any_rank_are_found(num_ranks: int, stride: int) -> None:
    """Pieces start at any byte, and each rank's head is looked at, however many there are."""
    gathered = torch.full((num_ranks * stride,), 255, dtype=torch.uint8)
    assert not GatherSizes.has_notice(gathered, num_ranks)
    mark = torch.frombuffer(bytearray(struct.pack("=Q", _MARK)), dtype=torch.uint8)
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        noticed = gathered.clone()
        noticed[rank * stride : rank * stride + 8] = mark
        assert GatherSizes.has_notice(noticed, num_ranks)
    between = gathered.clone()
    if stride >= 17:  # not at the head of a piece
        between[1:9] = mark
        assert not GatherSizes.has_notice(between, num_ranks)
