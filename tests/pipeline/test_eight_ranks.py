"""Eight processes, ``pp x dp x tp``, with dropout: losses, gradients and the state of the generator are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.steps import make_gpt2, mesh_of, same_steps, token_batch
from tests.pipeline.test_composition import make_mixtral, net_plan, sum_and_count
from tests.pipeline.test_steps import NAMES, assert_exact, make_net
from tests.ranks import RankPools
from tests.runtime.llama import make_llama
from vescale import plan_zoo
from vescale.plans import Plan


def with_dropout() -> nn.Module:
    return make_llama(attention_dropout=0.1, tie_word_embeddings=True)


# Hugging Face's own loss is float32, whose parts over a cut vocabulary are rounded otherwise; a callable's is float64.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"make": with_dropout, "splits": ["model.layers.1"], "loss": 1e-6},
    "gpt2": {
        "make": make_gpt2,
        "splits": [f"transformer.h.{n}" for n in (1, 2, 3)],
        "schedule": "ZBV",
        "callable": sum_and_count,
    },
    "mixtral": {"make": make_mixtral, "splits": ["model.layers.1"], "callable": sum_and_count},
    "net": {"make": make_net, "splits": [f"blocks.{n}" for n in (1, 2, 3)], "schedule": "Interleaved1F1B"},
}


def eight_ranks(name: str) -> dict[str, float]:
    given = MODELS[name]
    loss = given.get("callable")

    def plan() -> Plan:
        mesh = mesh_of(pp=2, dp=2, tp=2)
        made = net_plan(mesh) if name == "net" else plan_zoo.load(name, mesh)
        options = {"loss": loss} if loss is not None else {}
        return made.pipeline(
            split_before=given["splits"], schedule=given.get("schedule", "1F1B"), microbatches=4, **options
        )

    names = NAMES if name == "net" else ("input_ids", "labels")
    batches = [token_batch(step, names=names) for step in range(2)]
    return same_steps(given["make"], plan, batches, loss=loss, accumulate=loss is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_dropout_on_eight_ranks(ranks: RankPools, name: str) -> None:
    """Unequal numbers of labels in micro-batches, none in the first; gradients over two steps."""
    torch.manual_seed(0)
    assert_exact(ranks.run(eight_ranks, name, world_size=8), loss=MODELS[name].get("loss", 1e-12))
