"""Activation checkpointing in static mode: by entries of the plan, and by the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, tp_plan
from tests.static.test_units import batch, plan_of
from vescale import Plan
from vescale.comm import record_comms
from vescale.static import StaticReport, report

pytestmark = pytest.mark.helper("dispatch")


KINDS = "VESCALE_TEST_KINDS"
"""Of what the layers ran on, in an environment variable: what objects and globals hold is put back by a recomputation."""


class Layer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.environ[KINDS] += f"{type(x).__name__} "
        return self.drop(super().forward(x))


class Layers(nn.Module):
    """``how``: what checkpoints the layers: nothing, the model, or the model with ``use_reentrant``."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.how:
                x = checkpointing.checkpoint(layer, x, use_reentrant=self.how == "reentrant")
            else:
                x = layer(x)
        return x


def run(how: str, plan: Callable[[DeviceMesh], Plan], sizes: dict[str, int]) -> StaticReport:
    os.environ[KINDS] = ""
    models = both(lambda: Layers(how), plan, sizes)
    for step in range(4):
        x = batch(seed=step, rows=4 + 4 * (step % 2)).requires_grad_()
        with record_comms() as ledger:
            compare(models, x, seed=step)
        # On a device steps are compared by messages of their own, when the one before has come.
        records = [r for r in ledger.records if r.requester != "comparison of steps"]
        half = len(records) // 2
        events = [(r.op, r.axes, r.requester, r.bytes) for r in records]
        assert events[:half] == events[half:], step
        os.environ[KINDS] = ""
        compare(models, x, seed=step)
        assert len(os.environ[KINDS].split()) == 8  # two layers, twice each, in both models
    found = report(models[1])
    if "layers.0" in found.static:
        assert os.environ[KINDS].split().count("Tensor") == 4, os.environ[KINDS]
    return found


def checkpointed(policy: Any, plan: Callable[[DeviceMesh], Plan] = lambda mesh: tp_plan(mesh, r"layers\.\d+")) -> Any:
    return lambda mesh: plan(mesh).checkpoint(r"layers\.\d+", policy)


def by_plan() -> StaticReport:
    return run("", checkpointed("full"), {"tp": 2})


def by_plan_in_units() -> StaticReport:
    return run("", checkpointed("full", plan_of("zero3")), {"dp": 2})


def by_model() -> StaticReport:
    return run("plain", lambda mesh: tp_plan(mesh, r"layers\.\d+"), {"tp": 2})


def by_model_in_units() -> StaticReport:
    return run("plain", plan_of("zero3"), {"dp": 2})


def reentrant() -> StaticReport:
    return run("reentrant", lambda mesh: tp_plan(mesh, r"layers\.\d+"), {"tp": 2})


def selective() -> StaticReport:
    """Results of products are saved."""
    return run("", checkpointed("selective"), {"tp": 2})


@pytest.mark.parametrize(
    "case", [by_plan, by_plan_in_units, by_model, by_model_in_units], ids=lambda case: case.__name__
)
def test_static(ranks: RankPools, case: Any) -> None:
    for found in ranks.run(case, world_size=2):
        assert found.static_steps > 0 and not found.fallbacks, found
        assert {"", "layers.0", "layers.0.up", "layers.1"} <= set(found.static), found


def test_reentrant_checkpoints_run_in_eager_mode(ranks: RankPools) -> None:
    for found in ranks.run(reentrant, world_size=2):
        assert found.static_steps == 0 and "use_reentrant" in str(found), found


def test_modules_that_save_results_of_ops_run_in_eager_mode(ranks: RankPools) -> None:
    for found in ranks.run(selective, world_size=2):
        assert found.static_steps > 0, found
        assert {f.path for f in found.fallbacks} == {"layers.0", "layers.1"}, found
        assert all("saves results of ops" in f.reason for f in found.fallbacks)
