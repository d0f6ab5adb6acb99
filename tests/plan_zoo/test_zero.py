"""Every plan of the zoo with ZeRO-3's two lines: an unmodified model on data x tensor (or expert) parallel ranks."""

from __future__ import annotations

import pytest
import torch

from tests.plan_zoo.models import MODELS
from tests.plan_zoo.test_training import TOLERANCE
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from tests.runtime.zero import sharded_at_rest
from vescale import plan_zoo


def train(name: str) -> Step:
    model = MODELS[name]
    torch.manual_seed(3)  # inputs that are drawn
    sizes = {"dp": 2, "tp": 2}
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: sharded_at_rest(plan_zoo.load(name, mesh)),
        sizes,
        strict=True,
        loss=model.loss,
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_step_equals_one_device(ranks: RankPools, name: str) -> None:
    for step in ranks.run(train, name):
        assert step.is_same(TOLERANCE.get(name, 1e-9)), step
        assert step.implicit == 0
