"""What a forward computes across the rows of its batch: that of one device, or a plan error before the first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pipeline.forwards import FORWARDS, Net, batch_for
from tests.pipeline.steps import mesh_of, rel
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.plans import Plan, PlanError


class Rows(nn.Module):
    """A value for each row, and a loss of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        for n, block in enumerate(self.blocks):
            if n == 1 and self.kind == "rolled":
                x = x.roll(1, 0)
            x = block(x).tanh()
        return LOSSES[self.kind](self.out(x)[:, 0], r)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda z, r: (z - r).square().mean(),
    "quotient": lambda z, r: (z * (r > 0)).sum() / (r > 0).sum(),
    "groups in micro-batches": lambda z, r: (
        (r.view(-1, 2) - r.view(-1, 2).mean(1, keepdim=True)).flatten() * z
    ).mean(),
    "rolled": lambda z, r: (z - r).square().mean(),
    "advantages": lambda z, r: -((r - r.mean()) / r.std() * z).mean(),
    "ratio of one": lambda z, r: -((r - r.mean()) / r.std() * (z - z.detach()).exp()).mean(),
    "halves": lambda z, r: -F.logsigmoid(z.chunk(2)[0] - z.chunk(2)[1]).mean(),
    "normalized weights": lambda z, r: (z * r.abs() / r.abs().sum()).sum(),
    "positions": lambda z, r: (z * torch.arange(len(z))).mean(),
    "groups across": lambda z, r: ((r.view(-1, 8) - r.view(-1, 8).mean(1, keepdim=True)).flatten() * z).mean(),
}
REFUSED = {"rolled", "halves", "groups across"}


def batch_of_rows(rows: int = 8) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 6, generator=draws, dtype=torch.float64),
        "r": torch.randn(rows, generator=draws, dtype=torch.float64),
    }


def step_or_refusal(model: nn.Module, plan: Plan, batch: dict[str, Any], path: Callable[[Any], Any]) -> float | str:
    """The largest difference of loss and gradients from those of one device; or the message of a plan error."""
    one = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = path(one(**batch))
    expected.backward()
    try:
        model = parallelize(model, plan)
        torch.manual_seed(1)
        found = model.step(**batch)
    except PlanError as error:
        return str(error)
    largest = max(float(p.grad.abs().max()) for p in one.parameters() if p.grad is not None)
    differences = [rel(found, expected.detach()) if abs(float(expected)) > 1e-9 * largest else 0.0]
    for name, parameter in model.named_parameters():
        wanted = one.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:  # a sum of zero has rounding errors alone
            scale = max(float(wanted.abs().max()), 1e-2 * largest)
            differences.append(float((whole(parameter.grad) - wanted).abs().max()) / scale)
    return max(differences)


def kinds_case(kinds: list[str], rows: str) -> dict[str, float | str]:
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss="out", rows=rows)
        found[kind] = step_or_refusal(Rows(kind).double(), plan, batch_of_rows(), lambda out: out)
    return found


def test_rows_that_depend_on_each_other(ranks: RankPools) -> None:
    one, other = ranks.run(kinds_case, list(LOSSES), "batch", world_size=2)
    assert {kind for kind, result in one.items() if isinstance(result, str)} == REFUSED
    for kind, result in one.items():
        if isinstance(result, str):
            assert result == other[kind] and "microbatches=1" in result, kind
        else:
            assert max(result, other[kind]) <= 1e-12, (kind, result, other[kind])


def forwards_case(names: list[str], pp: int, microbatches: int, rows: int) -> dict[str, float | str]:
    found = {}
    for name in names:
        torch.manual_seed(0)
        splits = [f"blocks.{4 // pp * n}" for n in range(1, pp)]
        plan = Plan(mesh_of(pp=pp)).pipeline(split_before=splits, microbatches=microbatches, loss="out")
        found[name] = step_or_refusal(Net(name).double(), plan, batch_for(name, rows), lambda out: out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pp, microbatches, rows", [(2, 4, 8), (2, 2, 8), (2, 8, 8), (4, 4, 8), (4, 6, 12)])
def test_forwards(ranks: RankPools, pp: int, microbatches: int, rows: int) -> None:
    results = ranks.run(forwards_case, list(FORWARDS), pp, microbatches, rows, world_size=pp, timeout=1200)
    refused = {name for name, found in results[0].items() if isinstance(found, str)}
    wrong = {}
    for name in FORWARDS:
        found = [result[name] for result in results]
        if name in refused:
            assert all(message == found[0] for message in found), found
        elif not max(found) <= 1e-12:
            wrong[name] = max(found)
    assert not wrong, wrong
    assert len(refused) <= (0.26 if rows > microbatches else 0.35) * len(FORWARDS), sorted(refused)
    never = set(NEVER_REFUSED if rows > microbatches else NEVER_REFUSED[3:])  # the first have pairs of rows
    assert not refused & never, [results[0][name] for name in refused & never]


NEVER_REFUSED = [
    "grpo_without_old", "dpo_alternating", "simpo", "reinforce_whitened", "rloo", "dapo", "ppo_full", "gspo", "gae",
    "awac", "per", "dpo_concatenated", "reward_model", "byol", "moco", "dino", "two_tasks", "pos_weight",
    "weights_by_mean", "boxes", "centerness", "mel", "last_token", "ddpm", "mixup_flip", "jitter",
    "standardized_inputs", "scaled_inputs", "next_token", "cumulative",
]  # fmt: skip


def test_each_micro_batch_by_itself(ranks: RankPools) -> None:
    for found in ranks.run(kinds_case, ["quotient", "advantages"], "microbatch", world_size=2):
        assert found["quotient"] <= 1e-12 and found["advantages"] > 0.1
