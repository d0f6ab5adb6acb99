"""Models that carry no plan, of families beside the zoo's, under plans written by hand: two ranks (and four, marked slow)
against one device, with dropout on, through a step of AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.plan_zoo.models import tokens
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import InterleavedShard, Plan, parallelize
from vescale.runtime import ImplicitCommunicationError

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GATES = InterleavedShard(0, 2)

# Weights cut by output features, with their biases; by input features, with the sum's placement; inputs whole.
Entries = Mapping[str, Placement]


@dataclass(frozen=True)
class Family:
    """``batch``: the inputs that dp cuts; ``entries``: on tp; ``all_reduces``: a step's along tp, gradients' apart."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    batch: tuple[str, ...]
    entries: Entries
    collectives: dict[str, int]
    package: str = "transformers"
    output: str = "loss"
    strict_over_dp: bool = True

    def plan(self, mesh: DeviceMesh) -> Plan:
        plan = Plan(mesh)
        for name in self.batch:
            plan.shard(f"<in:{name}>", S0, mesh="dp")
        for path, placement in self.entries.items():
            plan.shard(path, placement, mesh="tp")
        return plan


def made(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, config)(**sizes)).train()

    return build


def unet() -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def images(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, size, size, dtype=torch.float64), "labels": torch.tensor([0, 2, 1, 1])}


def padded() -> dict[str, Any]:
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = mask[3, 2:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": torch.tensor([0, 2, 1, 1])}


def captions() -> dict[str, Any]:
    ids = tokens()
    ids[:, -1] = 63
    return {"input_ids": ids, "pixel_values": images(16)["pixel_values"], "return_loss": True}


def latents() -> dict[str, Any]:
    wide = functools.partial(torch.randn, dtype=torch.float64)
    return {"sample": wide(4, 4, 8, 8), "timestep": torch.tensor([1, 5, 7, 9]), "encoder_hidden_states": wide(4, 3, 16)}


SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT, CLIP = r"bert.encoder.layer.\d+", r"(text|vision)_model.encoder.layers.\d+"
SWIN, RESNET = r"swin.encoder.layers.\d+.blocks.\d+", r"resnet.encoder.stages.\d+.layers.\d+.layer"
UNET, BLOCK = r".*resnets.\d+", r".*transformer_blocks.\d+"
FAMILIES = {
    "bert": Family(
        made("BertForSequenceClassification", "BertConfig", vocab_size=64, num_labels=3, **SIZES),
        padded,
        ("input_ids", "labels"),
        {
            "bert.embeddings.word_embeddings.weight": S0,
            "bert.embeddings.word_embeddings.<out>": S1,  # the sequence, up to the pooler
            rf"{BERT}.attention.self.<in:hidden_states>": R,
            rf"{BERT}.intermediate.<in>": R,
            rf"{BERT}.(attention.self.(query|key|value)|intermediate.dense).(weight|bias)": S0,
            rf"{BERT}.(attention.)?output.dense.weight": S1,
            rf"{BERT}.(attention.)?output.dense.<out>": S1,
            "bert.pooler.<in>": R,
        },
        {"reduce_scatter_v": 4 * 2 + 1, "all_gather_v": 4 * 2 + 2},
    ),
    "clip": Family(
        made(
            "CLIPModel",
            "CLIPConfig",
            text_config={**SIZES, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 63},
            vision_config={**SIZES, "image_size": 16, "patch_size": 4},
            projection_dim=16,
        ),
        captions,
        ("input_ids", "pixel_values"),
        {
            rf"{CLIP}.self_attn.<in:hidden_states>": R,
            rf"{CLIP}.mlp.<in>": R,
            rf"{CLIP}.(self_attn.(q|k|v)_proj|mlp.fc1).(weight|bias)": S0,
            rf"{CLIP}.(self_attn.out_proj|mlp.fc2).weight": S1,
            rf"{CLIP}.(self_attn.out_proj|mlp.fc2).<out>": R,
        },
        {"all_reduce": 2 * 4 * 2},
        strict_over_dp=False,  # every text meets every image
    ),
    "swin": Family(  # windows, shifted ones too; a drop rate for whole samples
        made(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            window_size=4,
            num_labels=3,
            depths=[2, 2],
            num_heads=[2, 4],
            drop_path_rate=0.1,
        ),
        lambda: images(32),
        ("pixel_values", "labels"),
        {
            rf"{SWIN}.attention.<in:hidden_states>": R,
            rf"{SWIN}.mlp.<in>": R,
            rf"{SWIN}.(attention.(q|k|v)_proj|mlp.fc1).(weight|bias)": S0,
            rf"{SWIN}.attention.relative_position_bias.relative_position_bias_table": S1,
            rf"{SWIN}.(attention.o_proj|mlp.fc2).weight": S1,
            rf"{SWIN}.(attention.o_proj|mlp.fc2).<out>": R,
        },
        {"all_reduce": 4 * 4},
    ),
    "resnet": Family(  # the inner channels of bottlenecks, and their statistics
        made(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_labels=3,
        ),
        lambda: images(32),
        ("pixel_values", "labels"),
        {
            rf"{RESNET}.0.convolution.<in>": R,
            rf"{RESNET}.0.convolution.weight": S0,
            rf"{RESNET}.0.normalization.(weight|bias|running_mean|running_var)": S0,
            rf"{RESNET}.1.convolution.weight": S1,
            rf"{RESNET}.1.convolution.<out>": R,
        },
        {"all_reduce": 2 * 2},
    ),
    "unet": Family(
        unet,
        latents,
        ("sample", "timestep", "encoder_hidden_states"),
        {
            rf"{BLOCK}.(attn1|attn2).<in:hidden_states>": R,
            rf"{BLOCK}.(attn1|attn2).to_(q|k|v).weight": S0,
            rf"{BLOCK}.(attn1|attn2).to_out.0.weight": S1,
            rf"{BLOCK}.(attn1|attn2).to_out.0.<out>": R,
            rf"{BLOCK}.ff.<in>": R,
            rf"{BLOCK}.ff.net.0.proj.(weight|bias)": GATES,
            rf"{BLOCK}.ff.net.2.weight": S1,
            rf"{BLOCK}.ff.net.2.<out>": R,
            rf"{UNET}.conv1.<in>": R,
            rf"{UNET}.conv1.(weight|bias)": S0,
            rf"{UNET}.conv1.<out>": R,
        },
        {"all_reduce": 4 * 6 + 8, "all_gather_v": 8},
        package="diffusers",
        output="sample",
    ),
}


def train(name: str, sizes: dict[str, int]) -> Step:
    family = FAMILIES[name]

    def objective(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        found = getattr(model(**inputs), family.output)
        return found if found.ndim == 0 else found.square().mean()

    torch.manual_seed(3)  # inputs that are drawn
    return one_step(
        family.build,
        family.inputs(),
        lambda _, mesh: family.plan(mesh),
        sizes,
        strict=family.strict_over_dp or sizes["dp"] == 1,
        objective=objective,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    )


@pytest.mark.parametrize(
    ("dp", "tp"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)], ids=["tp", "dp", "dp x tp"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_step_equals_one_device(ranks: RankPools, name: str, dp: int, tp: int) -> None:
    family = FAMILIES[name]
    pytest.importorskip(family.package)
    for step in ranks.run(train, name, {"dp": dp, "tp": tp}, world_size=dp * tp):
        assert step.is_same(1e-9), step
        assert step.implicit == 0 or (not family.strict_over_dp and dp > 1)
        if tp == 2 and dp == 1:
            assert {op: n for (op, axes), n in step.collectives.items() if axes == "tp"} == family.collectives


def advised() -> None:
    """A convolution of cut output channels, without the entry that sums its input's gradient: what the error says to write
    does it."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))

    def step(*more: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 1)).double()
        plan = Plan(mesh).shard("2.(weight|bias)", S0).shard("2.<out>", R)
        for path in more:
            plan.shard(path, R)
        parallelize(model, plan, strict=True)
        model(torch.ones(2, 3, 4, 4, dtype=torch.float64)).square().sum().backward()

    with pytest.raises(
        ImplicitCommunicationError, match=r"its operand 'grad_out' as tp=P\(sum\) .* write `1.<out>: {tp: R}`"
    ):
        step()
    step("1.<out>")


def test_errors_of_gradients_name_the_output(ranks: RankPools) -> None:
    ranks.run(advised, world_size=2)
