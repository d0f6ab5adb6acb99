"""Every plan of the zoo: a training step of an unmodified model on meshes of two and four ranks against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plan_zoo.models import MODELS, labels
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import plan_zoo

# Routers, and rotary embeddings of some, compute in float32.
TOLERANCE = {"mixtral": 1e-6, "qwen3_moe": 1e-6, "deepseek_v3": 1e-6, "gpt_oss": 1e-6}
MESHES: dict[int, list[dict[str, int]]] = {2: [{"dp": 1, "tp": 2}], 4: [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}]}

# Collectives of forward and backward on two ranks, two layers, beside the reductions of parameters' gradients. With the
# sequence sharded: 4 reduce-scatters and 4 all-gathers a layer, 2 of each around them, 4 small all-reduces for the loss.
# Experts: one all-reduce a layer for the gradient of the routing weights. Latent attention: two a layer, for the gradients
# of the latent vectors. T5 and Whisper compute a loss of their own too, which is 3 small all-reduces.
SEQUENCE = {"reduce_scatter_v": 10, "all_gather_v": 10, "all_reduce": 4}
COLLECTIVES = {
    "llama": {"reduce_scatter_v": 10, "all_gather_v": 10, "all_to_all_v": 2, "all_reduce": 1},  # logits by tokens
    "llama_zero3": {"reduce_scatter_v": 10, "all_gather_v": 10, "all_to_all_v": 2, "all_reduce": 1},
    "qwen3": SEQUENCE,
    "gpt2": SEQUENCE,
    "vit": {"all_reduce": 4 * 2 + 1 + 4},
    "t5": {"reduce_scatter_v": 24, "all_gather_v": 24, "all_reduce": 4 + 3},
    "whisper": {"all_reduce": 4 * 2 + 6 * 2 + 3 + 4 + 3},
    "mixtral": {**SEQUENCE, "all_reduce": 4 + 2},
    "qwen3_moe": {**SEQUENCE, "all_reduce": 4 + 2},
    "gpt_oss": {**SEQUENCE, "all_reduce": 4 + 2},
    "deepseek_v3": {**SEQUENCE, "all_reduce": 4 + 2 * 2 + 1},  # the first layer is dense
}


def train(name: str, sizes: dict[str, int]) -> Step:
    model = MODELS[name]
    torch.manual_seed(3)  # inputs that are drawn
    return one_step(
        model.build, model.inputs(), lambda _, mesh: plan_zoo.load(name, mesh), sizes, strict=True, loss=model.loss
    )


def steps(world_size: int, names: list[str]) -> list[tuple[str, Any, Step]]:
    return [(name, sizes, train(name, sizes)) for name in names for sizes in MESHES[world_size]]


def test_every_plan_has_a_model() -> None:
    assert set(MODELS) == set(plan_zoo.names())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_step_equals_one_device(ranks: RankPools, name: str, world_size: int) -> None:
    for found in ranks.run(steps, world_size, [name], world_size=world_size):
        for _, sizes, step in found:
            assert step.is_same(TOLERANCE.get(name, 1e-9)), (sizes, step)
            assert step.implicit == 0
            if world_size == 2:
                assert {op: n for (op, axes), n in step.collectives.items() if axes == "tp"} == COLLECTIVES[name]


def balanced(name: str, sizes: dict[str, int]) -> Step:
    """With the model's own loss, in float32, and its load-balancing loss."""
    model = MODELS[name]
    inputs = {**model.inputs(), "labels": labels(), "output_router_logits": True}
    return one_step(
        model.build, inputs, lambda _, mesh: plan_zoo.load(name, mesh), sizes, loss=lambda output: output.loss
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_load_balancing_losses(ranks: RankPools, name: str) -> None:
    """Means over all tokens of all ranks; with the batch cut, their three small reductions are implicit."""
    for sizes, most_implicit in (({"dp": 1, "tp": 2}, 0), ({"dp": 2, "tp": 1}, 3)):
        for found in ranks.run(balanced, name, sizes, world_size=2):
            assert found.is_same(1e-6), found
            assert found.implicit <= most_implicit
