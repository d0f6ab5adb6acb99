"""Losses that need the rows of all micro-batches: computed once, on the last stage, as on one device."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.overrides import TorchFunctionMode

from tests.pipeline.steps import Net, counts_of, mesh_of, same_steps, token_batch
from tests.pipeline.test_steps import assert_exact
from tests.ranks import RankPools
from vescale import INIT, RUN, RaggedShard, parallelize
from vescale.comm import record_comms
from vescale.errors import PipelineWarning
from vescale.pipeline._gates import current_run
from vescale.pipeline._stage_run import StageRun
from vescale.plans import Plan

WIDTH = 16


class Contrast(Net):
    """Pairs of each row's embedding, which skips all stages, with the results of all rows; a weight that the loss reads
    itself; a result that is written to in place; and dropout, in modules and in the loss."""

    def __init__(self, kind: str = "loss") -> None:
        super().__init__(dropout=0.1)
        self.kind, self.scale = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.embed(ids)
        x, mask = self.dropout(first), (ids != 0).unsqueeze(-1).to(first.dtype)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        x.mul_(0.5)
        x = self.scale(x).tanh()
        a, b = F.dropout(x.mean(1), 0.1, self.training), first.mean(1)
        if self.kind == "callable":
            return {"a": a, "b": b}
        return {"loss": F.cross_entropy(a @ b.T, torch.arange(len(a))) + 1e-3 * self.head.weight.square().sum()}


def of_pairs(out: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(out["a"] @ out["b"].T, torch.arange(len(out["a"])), reduction="sum"), (
        batch["ids"] > 3
    ).sum()


def case(schedule: str, axes: dict[str, int], policy: Any, kind: str) -> dict[str, float]:
    names = [f"blocks.{n}" for n in ((1, 2, 3) if schedule in ("ZBV", "Interleaved1F1B") else (2,))]

    def plan() -> Plan:
        found = Plan(mesh_of(**axes))
        if "dp" in axes:
            found.shard(".*", RaggedShard(), mesh="dp", phase=INIT).shard(".*", Replicate(), mesh="dp", phase=RUN)
        if policy is not None:
            found.checkpoint(r"blocks\.\d+", policy)
        loss: Any = of_pairs if kind == "callable" else "out.loss"
        return found.pipeline(split_before=names, schedule=schedule, microbatches=4, mesh="pp", loss=loss)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Contrast(kind).double()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        batches = [token_batch(step, names=("ids", "labels")) for step in range(3)]
        found = same_steps(make, plan, batches, loss=of_pairs if kind == "callable" else None, accumulate=True)
    texts = [str(one.message) for one in told if one.category is PipelineWarning]
    is_first = torch.distributed.get_rank() == 0
    assert sum("each step runs every forward twice" in text for text in texts) == (2 if is_first else 0), texts
    return found


@pytest.mark.parametrize(
    ("schedule", "axes", "policy", "kind"),
    [
        ("1F1B", {"pp": 2}, None, "loss"),
        ("GPipe", {"pp": 2}, "full", "callable"),
        ("ZBV", {"pp": 2, "dp": 2}, "selective", "loss"),
        ("Interleaved1F1B", {"pp": 2, "tp": 2}, "full", "loss"),
        ("1F1B", {"pp": 2, "dp": 2}, None, "callable"),
    ],
)
def test_steps(ranks: RankPools, schedule: str, axes: dict[str, int], policy: Any, kind: str) -> None:
    size = 2 if len(axes) == 1 else 4
    assert_exact(ranks.run(case, schedule, axes, policy, kind, world_size=size))


class Rows(TorchFunctionMode):
    """The rows that linear layers of stages compute."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(current_run(), StageRun):
            self.number += len(args[0])
        return func(*args, **(kwargs or {}))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return (x.mean(1) * (w / w.sum())).sum()


def counts_case(
    axes: dict[str, int], schedule: str, reshard: bool | None
) -> tuple[dict[int, dict[str, int]], Counter[str], int]:
    def plan(mesh: Any) -> Plan:
        found = Plan(mesh)
        if "dp" in axes:
            found.shard(r"blocks.*", RaggedShard(), mesh="dp", phase=INIT).shard(
                r"blocks.*", Replicate(), mesh="dp", phase=RUN
            )
            found.unit(r"blocks\.\d+", reshard_after_forward=reshard)
        splits = [f"blocks.{n}" for n in ((1, 2, 3) if schedule == "ZBV" else (2,))]
        return found.pipeline(split_before=splits, schedule=schedule, microbatches=4, mesh="pp", loss="out.loss")

    torch.manual_seed(0)
    batch = token_batch(0, names=("ids", "labels"))
    predicted = counts_of(plan(axes), Contrast().double(), batch)
    model: Any = parallelize(Contrast().double(), plan(mesh_of(**axes)))
    model.step(**batch)
    model.zero_grad()
    with record_comms() as ledger:
        model.step(**batch)
    names = {"send": "sends", "recv": "receives", "all_gather_v": "gathers"}
    counted = Counter(names[r.op] for r in ledger.records if r.op in names)
    return predicted, counted, torch.distributed.get_rank() // axes.get("dp", 1)


@pytest.mark.parametrize(
    ("axes", "schedule", "reshard"),
    [
        ({"pp": 2}, "1F1B", None),
        ({"pp": 2, "dp": 2}, "ZBV", None),
        ({"pp": 2, "dp": 2}, "1F1B", None),
        ({"pp": 2, "dp": 2}, "1F1B", True),
        ({"pp": 2, "dp": 2}, "ZBV", True),
    ],
)
def test_counts_have_both_forwards(ranks: RankPools, axes: dict[str, int], schedule: str, reshard: bool | None) -> None:
    for predicted, counted, rank in ranks.run(counts_case, axes, schedule, reshard, world_size=2 * axes.get("dp", 1)):
        own = [n for n in predicted if (min(n, 3 - n) if schedule == "ZBV" else n) == rank]
        for what in ("sends", "receives", "gathers"):
            assert counted[what] == sum(predicted[stage][what] for stage in own), (what, counted, predicted)


def cost_case(microbatches: int) -> list[int]:
    torch.manual_seed(0)
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=microbatches, loss="out")
    model: Any = parallelize(Chain().double(), plan)
    found = []
    for _ in range(2):
        with Rows() as counted:
            model.step(x=torch.randn(12, WIDTH).double(), w=torch.rand(12).double())
        found.append(counted.number)
    return found


@pytest.mark.parametrize("microbatches", [2, 3, 6])
def test_a_trial_costs_one_forward_of_two_micro_batches(ranks: RankPools, microbatches: int) -> None:
    for first, second in ranks.run(cost_case, microbatches, world_size=2):
        assert second == 2 * 12 and first - second == 2 * (2 * 12 // microbatches)
