"""Hooks of parameters of a model in stages run once in a step, with complete gradients; optimizers that need all parameters
are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.examples import daily_sample
from tests.pipeline.steps import Net, mesh_of, rel, token_batch
from tests.pipeline.test_steps import sum_and_count
from tests.ranks import RankPools
from tests.runtime.zero import sharded_at_rest
from tests.whole import whole
from vescale import no_sync, parallelize
from vescale.errors import PipelineCallError
from vescale.optim._clip import _is_coupled
from vescale.plans import Plan

NAMES = ("ids", "labels")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def hook(model: nn.Module, kind: str, calls: list[str]) -> None:
    """``two``: hooks that do not commute; ``reads``: one that changes nothing; ``after``: one that changes ``.grad``;
    ``step``: an optimizer that steps in the backward."""
    for name, parameter in model.named_parameters():

        def clamp(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            calls.append(name)
            return gradient.clamp(-1e-3, 1e-3)

        def read(gradient: torch.Tensor, name: str = name) -> None:
            calls.append(name)

        def after(parameter: Any, name: str = name) -> None:
            calls.append(name)
            parameter.grad.clamp_(-1e-3, 1e-3)

        def step(parameter: Any, name: str = name) -> None:
            calls.append(name)
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        if kind == "two":
            parameter.register_hook(clamp)
            parameter.register_hook(lambda gradient: gradient * gradient)
        elif kind == "reads":
            parameter.register_hook(read)
        else:
            parameter.register_post_accumulate_grad_hook(after if kind == "after" else step)


def case(kind: str, loss: str, schedule: str, units: bool) -> tuple[float, list[int]]:
    """The largest difference of gradients and parameters over steps that accumulate, and how often each hook has run."""
    loss_of: Any = sum_and_count if loss == "function" else "out.loss"
    plan = Plan(mesh_of(pp=2, dp=2) if units else mesh_of(pp=2))
    if units:
        plan.shard("<in:(ids|labels)>", Shard(0), mesh="dp")
        sharded_at_rest(plan, ".*", "dp").unit(r"blocks\.\d+")
    splits = [2] if schedule == "1F1B" else [1, 2, 3]
    plan.pipeline(split_before=[f"blocks.{n}" for n in splits], schedule=schedule, microbatches=4, loss=loss_of)
    reference = make_net()
    model = parallelize(copy.deepcopy(reference), plan)
    calls: tuple[list[str], list[str]] = [], []
    hook(reference, kind, calls[0])
    hook(model, kind, calls[1])
    names, worst = dict(reference.named_parameters()), 0.0
    for step in range(2):
        batch = token_batch(step, names=NAMES)
        torch.manual_seed(step)
        out = reference(**batch)
        total, count = loss_of(out, batch) if callable(loss_of) else (out["loss"], 1)
        (total / count).backward()
        torch.manual_seed(step)
        model.step(**batch)
        for name, parameter in model.named_parameters():
            wanted = names[name]
            worst = max(worst, rel(whole(parameter.detach()), wanted.detach()))
            assert (parameter.grad is None) == (wanted.grad is None), name
            if parameter.grad is not None and wanted.grad is not None:
                worst = max(worst, rel(whole(parameter.grad), wanted.grad))
    return worst, sorted({calls[1].count(name) for name, _ in model.named_parameters()})


CASES = [
    (kind, loss, schedule, units)
    for kind in ("two", "reads", "after", "step")
    for loss in ("mean", "function")
    for schedule in ("1F1B", "ZBV")
    for units in (False, True)
]


@pytest.mark.parametrize(("kind", "loss", "schedule", "units"), daily_sample(CASES, 8))
def test_hooks_run_once_in_a_step(ranks: RankPools, kind: str, loss: str, schedule: str, units: bool) -> None:
    for worst, counts in ranks.run(case, kind, loss, schedule, units, world_size=4 if units else 2):
        assert worst <= 1e-12 and counts == [2], (worst, counts)


def refusals() -> None:
    model = parallelize(make_net(), Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4))
    batch = token_batch(0, names=NAMES)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with pytest.raises(PipelineCallError, match="LBFGS computes the step of each parameter from all parameters"):
        optimizer.step(lambda: model.step(**batch))
    model.embed.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # tied to the head
    with no_sync(model), pytest.raises(PipelineCallError, match="gradient of a parameter that several stages use"):
        model.step(**batch)


def test_what_cannot_be_done_is_refused(ranks: RankPools) -> None:
    ranks.run(refusals, world_size=2)


def test_which_optimizers_are_coupled() -> None:
    class ByNorm(torch.optim.SGD):
        """Divides by the norm of all gradients."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            return super().step(closure)

    def made(kind: Any, **options: Any) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(2, 2))], **options)
        return found

    assert _is_coupled(made(torch.optim.LBFGS)) and _is_coupled(made(ByNorm, lr=0.1))
    independent = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adafactor", "Muon")
    for name in independent:
        assert not _is_coupled(made(getattr(torch.optim, name))), name
