"""Every plan of the zoo: a training step of an unmodified model on meshes of two and four ranks against one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.plan_zoo.models import MODELS, labels
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import Plan, plan_zoo
from vescale.plans import LocalEntry, ShardEntry

# Routers, and rotary embeddings of some, compute in float32.
TOLERANCE = {"mixtral": 1e-6, "qwen3_moe": 1e-6, "deepseek_v3": 1e-6, "gpt_oss": 1e-6}
MESHES: dict[int, list[dict[str, int]]] = {2: [{"dp": 1, "tp": 2}], 4: [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 4}]}

# Collectives of forward and backward on two ranks, two layers, beside the reductions of parameters' gradients. With the
# sequence sharded: 4 reduce-scatters and 4 all-gathers a layer, 2 of each around them, 4 small all-reduces for the loss.
# Experts that tokens are sent to: 4 all-to-alls a layer in the place of half of these, and one of counts. Latent attention:
# two all-reduces a layer, for the gradients of the latent vectors. T5 and Whisper compute a loss of their own too, which is
# 3 small all-reduces.
SEQUENCE = {"reduce_scatter_v": 10, "all_gather_v": 10, "all_reduce": 4}
EXCHANGED = {"reduce_scatter_v": 6, "all_gather_v": 6, "all_to_all_v": 4 * 2, "counts": 2, "all_reduce": 4}
# Experts that meet all tokens: tokens, ids and weights are gathered, and the first and last have gradients.
MASKED = {"reduce_scatter_v": 6 + 3 * 2, "all_gather_v": 6 + 4 * 2, "all_reduce": 4}
COLLECTIVES = {
    "llama": {"reduce_scatter_v": 10, "all_gather_v": 10, "all_to_all_v": 2, "all_reduce": 1},  # logits by tokens
    "llama_zero3": {"reduce_scatter_v": 10, "all_gather_v": 10, "all_to_all_v": 2, "all_reduce": 1},
    "qwen3": SEQUENCE,
    "gpt2": SEQUENCE,
    # What comes whole is cut before the first layer, which costs a gather in backward; the norm's result is gathered.
    "vit": {"reduce_scatter_v": 4 * 2, "all_gather_v": 4 * 2 + 2, "all_reduce": 1 + 4},
    "t5": {"reduce_scatter_v": 24, "all_gather_v": 24, "all_reduce": 4 + 3},
    "whisper": {"reduce_scatter_v": 4 * 2 + 6 * 2 + 3, "all_gather_v": 4 * 2 + 6 * 2 + 4, "all_reduce": 4 + 3},
    # 4 + 4 a layer, the last sequence gathered, and the first one's gradient; 2 all-reduces of each layer's modulation.
    "dit": {"reduce_scatter_v": 4 * 2, "all_gather_v": 4 * 2 + 2, "all_reduce": 2 * 2 + 2},
    # 8 + 8 for images and texts, 2 + 2 for the images' own attention, 4 for modulation; of the last layer's texts, 1 + 1.
    "sd3": {
        "reduce_scatter_v": 8 * 2 + 2 + 5,
        "all_gather_v": 8 * 2 + 2 + 5 + 2,
        "all_reduce": 4 * 3 + 2,
    },
    "mixtral": EXCHANGED,
    "qwen3_moe": EXCHANGED,
    "gpt_oss": EXCHANGED,
    # The first layer is dense; in the second, shared experts beside the others.
    "deepseek_v3": {**SEQUENCE, "all_to_all_v": 4, "counts": 1, "all_reduce": 4 + 2 * 2},
}
MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
MASKED_COLLECTIVES = {
    **dict.fromkeys(MIXTURES, MASKED),
    "deepseek_v3": {"reduce_scatter_v": 10 + 3, "all_gather_v": 10 + 4, "all_reduce": 4 + 2 * 2},
}


def with_dispatch(plan: Plan, dispatch: str) -> Plan:
    """The same plan, whose tokens meet experts in the other way."""
    found = Plan(plan.mesh or plan.axes)
    for entry in plan.entries:
        found.add(replace(entry, dispatch=dispatch) if isinstance(entry, LocalEntry) else entry)
    return found


def train(name: str, sizes: dict[str, int], dispatch: str = "all_to_all") -> Step:
    model = MODELS[name]
    torch.manual_seed(3)  # inputs that are drawn
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: with_dispatch(plan_zoo.load(name, mesh), dispatch),
        sizes,
        strict=True,
        objective=model.objective,
        batch_axis="dp" if model.package == "diffusers" else None,
    )


def steps(world_size: int, name: str, dispatch: str = "all_to_all") -> list[tuple[Any, Step]]:
    return [(sizes, train(name, sizes, dispatch)) for sizes in MESHES[world_size]]


def test_every_plan_has_a_model() -> None:
    assert set(MODELS) == {name for name in plan_zoo.names() if not name.endswith("_cp")}
    assert {name.removesuffix("_cp") for name in plan_zoo.names()} == set(MODELS)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_step_equals_one_device(ranks: RankPools, name: str, world_size: int) -> None:
    MODELS[name].need()
    for found in ranks.run(steps, world_size, name, world_size=world_size):
        for sizes, step in found:
            assert step.is_same(TOLERANCE.get(name, 1e-9)), (sizes, step)
            assert step.implicit == 0
            if world_size == 2:
                assert {op: n for (op, axes), n in step.collectives.items() if axes == "tp"} == COLLECTIVES[name]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_meet_all_tokens(ranks: RankPools, name: str, world_size: int) -> None:
    for found in ranks.run(steps, world_size, name, "mask", world_size=world_size):
        for sizes, step in found:
            assert step.is_same(TOLERANCE.get(name, 1e-9)), (sizes, step)
            if world_size == 2:
                assert {op: n for (op, axes), n in step.collectives.items() if axes == "tp"} == MASKED_COLLECTIVES[name]


def without_sequence_parallel(plan: Plan) -> Plan:
    """What ranks sum lies whole on each of them, and not cut over the sequence."""
    found = Plan(plan.mesh or plan.axes)
    for entry in plan.entries:
        if isinstance(entry, ShardEntry) and entry.path.text.endswith("<out>"):
            whole = tuple((axis, Replicate() if (axis, p) == ("tp", Shard(1)) else p) for axis, p in entry.placements)
            entry = replace(entry, placements=whole)
        found.add(entry)
    return found


def plainly(name: str) -> Step:
    model = MODELS[name]
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: without_sequence_parallel(plan_zoo.load(name, mesh)),
        {"tp": 2, "dp": 1},
        strict=True,
        objective=model.objective,
    )


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_plain_tensor_parallelism(ranks: RankPools, name: str) -> None:
    """4 all-reduces a layer: forward and backward, attention and feed-forward. Around the layers one after the embedding,
    one of the gradient before the head, and the four small ones of the loss."""
    for step in ranks.run(plainly, name, world_size=2):
        assert step.is_same(1e-9) and step.implicit == 0, step
        assert step.collectives == {("all_reduce", "tp"): 4 * 2 + 2 + 4}


def balanced(name: str, sizes: dict[str, int], padded: bool) -> Step:
    """With the model's own loss, in float32, and its load-balancing loss."""
    model = MODELS[name]
    inputs = {**model.inputs(), "labels": labels(), "output_router_logits": True}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, 5:] = 0
    return one_step(
        model.build,
        inputs,
        lambda _, mesh: plan_zoo.load(name, mesh),
        sizes,
        strict=True,
        loss=lambda output: output.loss,
    )


def balanced_on_meshes(name: str, world_size: int, padded: bool) -> list[tuple[dict[str, int], Step]]:
    meshes = {2: [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}], 4: [{"dp": 2, "tp": 2}]}
    return [(sizes, balanced(name, sizes, padded)) for sizes in meshes[world_size]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_load_balancing_losses(ranks: RankPools, name: str, world_size: int, padded: bool) -> None:
    """Means over all tokens of all ranks: two all-reduces of as many numbers as there are experts."""
    for found in ranks.run(balanced_on_meshes, name, world_size, padded, world_size=world_size):
        for sizes, step in found:
            assert step.is_same(1e-6) and step.implicit == 0, (sizes, step)
            if sizes["tp"] == 1 and not padded:
                assert step.gradient[0] <= 1e-12, step
