"""No usual number of ranks divides the 50,257 rows of GPT-2, or the 51,865 of Whisper: their plans on small vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import plan_zoo


def odd_model(name: str) -> nn.Module:
    import transformers

    config: Any = MODELS[name].build().config
    config = type(config)(**{**config.to_dict(), "vocab_size": 61})
    torch.manual_seed(0)
    return getattr(transformers, MODELS[name].build().__class__.__name__)._from_config(config)


def train(name: str, size: int) -> Step:
    zoo = MODELS[name]
    torch.manual_seed(3)
    return one_step(
        lambda: odd_model(name),
        zoo.inputs(),
        lambda _, mesh: plan_zoo.load(name, mesh),
        {"dp": 1, "tp": size},
        strict=True,
        objective=zoo.objective,
    )


@pytest.mark.parametrize(
    ("name", "size"), [("gpt2", 2), ("whisper", 2), pytest.param("gpt2", 4, marks=pytest.mark.slow)]
)
def test_step_equals_one_device(ranks: RankPools, name: str, size: int) -> None:
    MODELS[name].need()
    for step in ranks.run(train, name, size, world_size=size):
        assert step.is_same(1e-9) and step.gradient[0] <= 1e-12, step
        assert step.implicit == 0
