"""Ranks that bring different things get the same error, before any collective, in under five seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.ranks import RankPools
from vescale import Plan, PlanMismatchError, parallelize
from vescale.agreement import Round
from vescale.agreement import _round as agreement_round
from vescale.comm import record_comms
from vescale.errors import LateRanksWarning
from vescale.fsdp import fully_shard

pytestmark = pytest.mark.waits

ODD = 2  # the rank that differs


class Net(nn.Module):
    def __init__(self, hidden: int = 8, dtype: torch.dtype = torch.float32, swapped: bool = False) -> None:
        super().__init__()
        for name in ("down", "up") if swapped else ("up", "down"):
            setattr(self, name, nn.Linear(*((4, hidden) if name == "up" else (hidden, 4)), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def plan_of(mesh: Any, dim: int = 0) -> Plan:
    return Plan(mesh).shard("up.weight", Shard(dim), mesh="tp")


def another_entry(mesh: Any) -> None:
    parallelize(Net(), plan_of(mesh, 1))


def another_path(mesh: Any) -> None:
    parallelize(Net(), plan_of(mesh).shard("down.weight", Shard(1), mesh="tp"))


def an_attention_entry(mesh: Any) -> None:
    parallelize(Net(), plan_of(mesh).attention("up", "ulysses", mesh="tp"))


def a_plan_that_cannot_be(mesh: Any) -> None:
    parallelize(Net(), plan_of(mesh).shard("sideways.weight", Shard(1), mesh="tp"))


def a_misfit(mesh: Any) -> None:
    parallelize(Net(hidden=9), plan_of(mesh))


def another_shape(mesh: Any) -> None:
    parallelize(Net(hidden=16), plan_of(mesh))


def another_dtype(mesh: Any) -> None:
    parallelize(Net(dtype=torch.float64), plan_of(mesh))


def another_order(mesh: Any) -> None:
    parallelize(Net(swapped=True), plan_of(mesh))


def a_frozen_parameter(mesh: Any) -> None:
    model = Net()
    model.up.bias.requires_grad_(False)
    parallelize(model, plan_of(mesh))


def another_value(mesh: Any) -> None:
    model = Net()
    with torch.no_grad():
        model.down.bias[3] += 1e-7
    parallelize(model, plan_of(mesh))


def another_seed(mesh: Any) -> None:
    model = Net()
    torch.manual_seed(5)
    parallelize(model, plan_of(mesh))


def more_numbers_drawn(mesh: Any) -> None:
    model = Net()
    torch.rand(1)
    parallelize(model, plan_of(mesh))


def another_torch(mesh: Any) -> None:
    version = torch.__version__
    torch.__version__ = "2.99.0"
    try:
        parallelize(Net(), plan_of(mesh))
    finally:
        torch.__version__ = version


CASES: list[tuple[Callable[[Any], None], str]] = [
    (another_entry, r"'shard up.weight' of plan is placements={tp: S\(0\)}.* ranks \[0, 1, 3\] and placements={tp: S\(1\)}"),
    (another_path, r"'shard down.weight' of plan is nothing on ranks \[0, 1, 3\] and .* on rank 2; build the same plan"),
    (an_attention_entry, r"'attention up' of plan is nothing on ranks \[0, 1, 3\] and methods={tp: ulysses} on rank 2"),
    (a_plan_that_cannot_be, r"'shard sideways.weight' of plan is nothing on ranks \[0, 1, 3\]"),
    (a_misfit, r"'up.weight' of parameters and buffers is \(8, 4\) .* and \(9, 4\) float32 on rank 2"),
    (another_shape, r"'up.weight' of parameters and buffers is \(8, 4\) .* and \(16, 4\) float32 on rank 2"),
    (another_dtype, r"'up.weight' .* is \(8, 4\) float32 on ranks \[0, 1, 3\] and \(8, 4\) float64 on rank 2"),
    (another_order, r"'number 0 in the order' of parameters and buffers is up.weight .* and down.weight on rank 2"),
    (a_frozen_parameter, r"'up.bias' .* and \(8,\) float32, frozen on rank 2; build the same model"),
    (another_value, r"down.bias has other values: .* on rank 2; use the same seed on every rank before the model"),
    (another_seed, r"'the default generator' of random state is seed 0, .* and seed 5, .* on rank 2; use the same seed"),
    (more_numbers_drawn, r"random state is seed 0, state .* and seed 0, state .* on rank 2"),
    (another_torch, r"'torch' of versions is 2\..* on ranks \[0, 1, 3\] and 2.99.0 on rank 2; install the same"),
]  # fmt: skip


def mismatches() -> list[str]:
    """Each case: the same error on every rank, no collective; and then the ranks can go on together."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    texts = []
    parallelize(Net(), plan_of(mesh))  # whatever is loaded on first use
    for odd, pattern in CASES:
        torch.manual_seed(0)
        begin = time.monotonic()
        with record_comms() as ledger, pytest.raises(PlanMismatchError, match=pattern) as found:
            odd(mesh) if rank == ODD else parallelize(Net(), plan_of(mesh))
        assert time.monotonic() - begin < 5, odd
        assert found.value.ranks == (ODD,) and ledger.count() == 0, (odd, found.value.ranks)
        texts.append(str(found.value))
    torch.manual_seed(0)
    parallelize(Net(), plan_of(mesh))
    return texts


def test_every_rank_gets_the_same_error(ranks: RankPools) -> None:
    texts = ranks.run(mismatches)
    assert all(other == texts[0] for other in texts)


def halves() -> str:
    """Ranks that differ two against two, and another mesh."""
    rank = dist.get_rank()
    with pytest.raises(
        PlanMismatchError, match=r"'axes' of mesh is .*tp=4.* on ranks \[0, 1\] and .*tp=2.* on ranks \[2, 3\]"
    ):
        names = ("tp",) if rank < 2 else ("dp", "tp")
        parallelize(Net(), plan_of({"tp": 4} if rank < 2 else {"dp": 2, "tp": 2}))
    with pytest.raises(PlanMismatchError) as found:
        parallelize(Net(hidden=8 if rank < 2 else 12), plan_of({"tp": 4}))
    assert found.value.ranks == (2, 3), names
    return str(found.value)


def test_ranks_that_differ_in_halves_and_meshes(ranks: RankPools) -> None:
    assert len(set(ranks.run(halves))) == 1


def absent(late: int) -> str:
    """With ``VESCALE_TIMEOUT`` the others end, naming the rank that never comes; without they say whom they wait for."""
    import os

    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    message = ""
    dist.barrier()
    if rank != late:
        os.environ["VESCALE_TIMEOUT"] = "1.5"
        begin = time.monotonic()
        try:
            with pytest.raises(PlanMismatchError, match=rf"ranks \[{late}\] did not arrive") as found:
                parallelize(Net(), plan_of(mesh))
        finally:
            del os.environ["VESCALE_TIMEOUT"]
        assert time.monotonic() - begin < 5
        assert found.value.ranks == (late,)
        message = str(found.value)
    dist.barrier()
    if rank == late:  # it learns that the others have given up
        with pytest.raises(PlanMismatchError, match=rf"ranks \[{late}\] did not arrive"):
            parallelize(Net(), plan_of(mesh))
    return message


def test_a_rank_that_never_comes_is_named(ranks: RankPools) -> None:
    for late in (0, 3):
        messages = set(ranks.run(absent, late)) - {""}
        assert len(messages) == 1 and "call parallelize on every rank" in messages.pop()


def lateness() -> list[str]:
    rounds = Round(range(4), "late ranks", timedelta(seconds=20))
    dist.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if dist.get_rank() in (0, 2):
            time.sleep(4.6)
        rounds.exchange(b"", lambda: "a test")
    return [str(w.message) for w in said if issubclass(w.category, LateRanksWarning)]


def test_late_ranks_are_named_while_the_others_wait(ranks: RankPools) -> None:
    said = ranks.run(lateness)
    assert said[0] == said[2] == [] and len(said[1] + said[3]) == 1, said  # of the rank that has come first
    assert "ranks [0, 2] have not arrived for 3 s" in (said[1] + said[3])[0]


def lateness_of_work() -> list[str]:
    """Ranks 0 and 2 have come, and work; rank 3 comes late in the second round."""
    rounds = Round(range(4), "ranks that work", timedelta(seconds=20))
    rank = dist.get_rank()

    def work() -> bytes:
        time.sleep(0.8 if rank in (0, 2) else 0)
        return b"done"

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(agreement_round, "_PATIENCE", timedelta(seconds=0.2))
        dist.barrier()
        assert rounds.exchange(work, lambda: "a first test") == [b"done"] * 4
        if rank == 3:
            time.sleep(2.4)
        rounds.exchange(work, lambda: "a second test")
    return [str(w.message) for w in said if issubclass(w.category, LateRanksWarning)]


def test_ranks_that_work_are_not_late(ranks: RankPools) -> None:
    said = [text for texts in ranks.run(lateness_of_work) for text in texts]
    assert len(said) == 1 and said[0].startswith("a second test: ranks [3] have not arrived"), said


def of_fully_shard() -> str:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    model = Net(dtype=torch.float64 if rank == ODD else torch.float32)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 4, dtype=model.up.weight.dtype)
    with (
        record_comms() as ledger,
        pytest.raises(PlanMismatchError, match=r"of parameters is .* float64 on rank 2") as found,
    ):
        model(x)
    assert ledger.count() == 0
    return str(found.value)


def test_fully_shard_compares_too(ranks: RankPools) -> None:
    assert len(set(ranks.run(of_fully_shard))) == 1


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf"])
def test_a_timeout_that_is_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    from vescale.agreement import wait_limit

    monkeypatch.setenv("VESCALE_TIMEOUT", text)
    with pytest.raises(ValueError, match=rf"VESCALE_TIMEOUT is '{text}'; set it to a positive number"):
        wait_limit()
