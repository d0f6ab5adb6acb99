"""Ranks that gather and reduce different numbers of units: all raise, and their processes end."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
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
from vescale.agreement import Watch
from vescale.gradients._collective_order import _MARK, AgreedCollectives, has_notice

GATHER, REDUCTION, END_OF_BACKWARD = 0, 1, 3


@pytest.fixture
def agreed() -> Iterator[AgreedCollectives]:
    """Of one rank, whose others want what it wants."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield AgreedCollectives(dist.group.WORLD, Watch([0], "a test", lambda found: RuntimeError()))
    dist.destroy_process_group()


def agree(agreed: AgreedCollectives, model: int, num_bytes: int, kind: int = GATHER) -> bool:
    return agreed.agree((kind, model, num_bytes), 1, torch.device("cpu"))


def test_iterations_that_differ_are_not_all_remembered(agreed: AgreedCollectives) -> None:
    """Each iteration gathers a unit that no iteration before it has gathered."""
    for iteration in range(40_000):
        assert agree(agreed, iteration, 8) and agree(agreed, iteration, 4)
        agreed.begin(END_OF_BACKWARD)
    assert len(agreed._next) < 70_000


class Asked:
    """A store that all ranks have asked for the same."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def have_all_come(self, moment: str, wanted: str) -> bool:
        self.moments.append(moment)
        return True

    def exchange(self, wanted: bytes, about: Any) -> list[bytes]:
        self.moments.append("")
        return [wanted]


def test_after_an_error_ranks_agree_anew(agreed: AgreedCollectives) -> None:
    """They may have gathered different units since the last comparison, and remember different sizes."""
    asked = agreed._consensus = Asked()  # type: ignore[assignment]
    for has_raised in (False, False, True):
        for num_bytes in (64, 128):
            assert agree(agreed, 1, num_bytes)
        agreed.begin_after_error() if has_raised else agreed.begin(END_OF_BACKWARD)
        asked.moments.clear()
    assert agree(agreed, 1, 64) and len(asked.moments) == 1


def test_a_new_model_begins_anew(agreed: AgreedCollectives) -> None:
    """Ranks may have been in different places when an error had ended the model before. What they expected then differed,
    and where one came 3 s late to the first gather, they told each other in pieces of different sizes: the process ended."""
    asked = agreed._consensus = Asked()  # type: ignore[assignment]
    agreed._is_in_notices = None  # type: ignore[assignment,method-assign]
    for model, last in ((1, (64, 128, 128)), (2, (64,)), (3, ())):
        agreed.begin_model(model)
        asked.moments.clear()
        assert agree(agreed, model, 48) and asked.moments == [""], (
            "no gather is expected in whose place a notice could be"
        )
        for num_bytes in last:
            agree(agreed, model, num_bytes)


def test_what_is_like_before_asks_nobody(agreed: AgreedCollectives) -> None:
    """Gathers, reductions and the end of a backward, of two models that take turns."""
    asked = agreed._consensus = Asked()  # type: ignore[assignment]
    steps = []
    for _ in range(4):
        asked.moments.clear()
        for model in (1, 2):
            for _ in range(3):
                agree(agreed, model, 48)
            for _ in range(3):
                agree(agreed, model, 48)
                agree(agreed, model, 96, REDUCTION)
            agree(agreed, model, 44, END_OF_BACKWARD)
            agreed.begin(END_OF_BACKWARD)
        steps.append(len(asked.moments))
    assert steps[2:] == [0, 0] and steps[1] <= steps[0] <= 12, steps


@pytest.mark.parametrize("number", [2, 3, 8])
def test_accumulation_asks_nobody(agreed: AgreedCollectives, number: int) -> None:
    """Backwards of which only the last one reduces, in the place of a gather of the others."""
    asked = agreed._consensus = Asked()  # type: ignore[assignment]
    counts = []
    for _ in range(4):
        asked.moments.clear()
        for backward in range(number):
            for num_bytes in (48, 96, 96, 96, 96):
                agree(agreed, 1, num_bytes)
            if backward == number - 1:
                agree(agreed, 1, 64, REDUCTION)
                agree(agreed, 1, 96)
                agree(agreed, 1, 44, END_OF_BACKWARD)
            else:
                agree(agreed, 1, 96)
            agreed.begin(END_OF_BACKWARD if backward == number - 1 else GATHER)
        counts.append(len(asked.moments))
    assert counts[2:] == [0, 0], counts


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
    """Reductions, and the end of a backward, are noted among all ranks, gathers among those that shard."""
    posted: dict[tuple[int, ...], list[int]] = {}
    begin = Watch.begin

    def noted(watch: Watch, kind: int, num_bytes: int, unit: Any) -> None:
        if isinstance(unit, int):  # of a collective, and not of an event
            posted.setdefault(watch.ranks, []).append(kind)
        begin(watch, kind, num_bytes, unit)

    model, _ = made(EQUAL, 2)
    model(X, (0,)).backward()
    Watch.begin = noted  # type: ignore[method-assign]
    try:
        model(X, (0,)).backward()
        model.set_requires_all_reduce(False)
        model(X, (0,)).backward()
    finally:
        Watch.begin = begin  # type: ignore[method-assign]
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
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
@pytest.mark.parametrize("what", ["forward", "later", "evaluation", "accumulation"])
def test_different_numbers_without_checks(tmp_path: Path, what: str, widths: tuple[int, ...], num_ranks: int) -> None:
    """Ranks that wait tell each other through the store where they are, and no message of another size meets another."""
    env = {"VESCALE_CHECK": "off"}
    options = {"reshard_after_forward": False} if what == "later" else {}
    result = run_job(different_numbers, tmp_path, widths, options, what, world_size=num_ranks, env=env)
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


@pytest.mark.parametrize("num_ranks", [1, 3, 64, 65, 1000])
@pytest.mark.parametrize("stride", [16, 17, 64])
def test_notices_of_any_rank_are_found(num_ranks: int, stride: int) -> None:
    """Pieces start at any byte, and each rank's head is looked at, however many there are."""
    gathered = torch.full((num_ranks * stride,), 255, dtype=torch.uint8)
    assert not has_notice(gathered, num_ranks)
    mark = torch.frombuffer(bytearray(struct.pack("=Q", _MARK)), dtype=torch.uint8)
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        noticed = gathered.clone()
        noticed[rank * stride : rank * stride + 8] = mark
        assert has_notice(noticed, num_ranks)
    between = gathered.clone()
    if stride >= 17:  # not at the head of a piece
        between[1:9] = mark
        assert not has_notice(between, num_ranks)
