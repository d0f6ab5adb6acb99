"""Every plan of the zoo with ZeRO-3's two lines: an unmodified model on data x tensor (or expert) parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.plan_zoo.models import MODELS
from tests.plan_zoo.test_training import TOLERANCE
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from tests.runtime.zero import sharded_at_rest
from vescale import Plan, plan_zoo

# DiT's model calls a part of its first layer by itself, after all layers.
CALLED_ALONE = {"dit": "transformer_blocks.0.norm1.emb"}


def zero3(name: str, mesh: DeviceMesh) -> Plan:
    plan = sharded_at_rest(plan_zoo.load(name, mesh))
    return plan.unit(CALLED_ALONE[name]) if name in CALLED_ALONE else plan


def train(name: str) -> Step:
    model = MODELS[name]
    torch.manual_seed(3)  # inputs that are drawn
    sizes = {"dp": 2, "tp": 2}
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: zero3(name, mesh),
        sizes,
        strict=True,
        objective=model.objective,
    )


def with_experts_on(axis: str) -> Step:
    """The plan that the model carries, whole experts on each rank of ``axis``; where that is dp, they stay as they are."""
    model = MODELS["mixtral"]
    others = ".*(?<!experts.(gate_up|down)_proj)" if axis == "dp" else ".*"

    def plan(mixtral: nn.Module, mesh: DeviceMesh) -> Plan:
        return sharded_at_rest(Plan.from_hf(mixtral, mesh, expert_axis=axis, sequence_parallel=True), others)

    return one_step(model.build, model.inputs(), plan, {"dp": 2, "tp": 2}, strict=True, objective=model.objective)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_experts_of_the_models_own_plan(ranks: RankPools, axis: str) -> None:
    for step in ranks.run(with_experts_on, axis):
        assert step.is_same(1e-6) and step.gradient[0] <= 1e-12, step
        assert step.implicit == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_step_equals_one_device(ranks: RankPools, name: str) -> None:
    MODELS[name].need()
    for step in ranks.run(train, name):
        assert step.is_same(TOLERANCE.get(name, 1e-9)), step
        assert step.implicit == 0
