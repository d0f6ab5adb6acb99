"""Hugging Face models under the plans they carry: static mode gives the numbers of eager mode, and most parts run static."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.plans.tiny_hf import planned_config, planned_configs, tiny_inputs, tiny_model
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.whole import whole
from vescale import parallelize
from vescale.plans import Plan
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

# Experts; a convolution by parameters of a module that is not called;
# masks by torch.vmap. With how many parts in eager mode.
DAILY = {
    "mixtral:MixtralConfig": 0,
    "minicpm3:MiniCPM3Config": 0,  # attention that writes its keys into a tensor
    "lfm2_moe:Lfm2MoeConfig": 0,
    "gemma4:Gemma4TextConfig": 0,  # a configuration whose layers differ
    "inkling:InklingTextConfig": 0,  # whole attention before sharded layers: its gradient arrives as a pending sum
    "t5gemma2:T5Gemma2TextConfig": 1,  # functions of DTensors under torch.vmap: the model as a whole
}
# Gradients of hyper-connections nearly cancel, and are computed in float32.
TOLERANCE = {"hy_v4:HYV4Config": 1e-5, "hy_v4_vl:HYV4VLTextConfig": 1e-5}
NUM_STEPS = 3
# Models of which a part runs in eager mode: gradients of one tensor with several placements, autograd functions of the
# model's own, masks by torch.vmap.
PARTLY = {
    *("embedding_gemma2:EmbeddingGemma2TextConfig", "gemma3n:Gemma3nTextConfig", "hrm_text:HrmTextConfig"),
    *("phimoe:PhimoeConfig", "t5gemma2:T5Gemma2TextConfig", "unlimited_ocr:UnlimitedOcrTextConfig"),
}


def step(model: Any, inputs: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """Loss and gradients of a step."""
    model.zero_grad()
    torch.manual_seed(seed)
    out = model(**inputs)
    loss = next(x for x in out.values() if isinstance(x, torch.Tensor) and x.is_floating_point()).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def made(name: str, mode: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model in a mode, and inputs."""
    quiet()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = tiny_model(planned_config(name)).double()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in tiny_inputs(model).items()}
    return parallelize(model, Plan.from_hf(model, mesh), mode=mode), inputs


def compare(name: str) -> tuple[int, str]:
    """How many parts of the model fell back to eager mode, and where numbers are others than those of eager mode."""
    (eager, inputs), (static, _) = made(name, "eager"), made(name, "static")
    tolerance = TOLERANCE.get(name, 1e-6)
    for seed in range(NUM_STEPS):
        expected, found = step(eager, inputs, seed), step(static, inputs, seed)
        if list(expected) != list(found):
            return 0, f"step {seed}: gradients of {sorted(expected.keys() ^ found.keys())}"
        for key, x in expected.items():
            if isinstance(x, DTensor) and x.placements != found[key].placements:  # type: ignore[attr-defined]
                return 0, f"step {seed}: {key} has other placements"
            # Gradients of some tensors are reduced at another place, so that sums have another order.
            a, b = whole(x), whole(found[key])
            if not torch.allclose(a, b, rtol=0, atol=tolerance * float(a.abs().max()), equal_nan=True):
                return 0, f"step {seed}: {key} differs by {float((a - b).abs().max() / a.abs().max())}"
    return len({fallback.path for fallback in report(static).fallbacks}), ""


@pytest.mark.parametrize("name", DAILY)
def test_numbers_of_eager_mode(ranks: RankPools, name: str) -> None:
    assert ranks.run(compare, name, world_size=2) == [(DAILY[name], "")] * 2


def compare_if_it_runs(name: str) -> tuple[int, str] | None:
    """None for a model that does not run in eager mode: most of these do not run on one device either."""
    try:
        eager, inputs = made(name, "eager")
        for seed in range(NUM_STEPS):
            step(eager, inputs, seed)
    except Exception:  # whatever a model raises for sizes that rules have drawn
        return None
    return compare(name)


@pytest.mark.slow
def test_every_model_that_runs(ranks: RankPools) -> None:
    """135 of the 166, and all but six of them are static as a whole."""
    found = {name: ranks.run(compare_if_it_runs, name, world_size=2)[0] for name in planned_configs()}
    ran = {name: one for name, one in found.items() if one is not None}
    assert not {name: wrong for name, (_, wrong) in ran.items() if wrong}
    partly = {name for name, (num_fallbacks, _) in ran.items() if num_fallbacks}
    assert len(ran) >= 130 and partly <= PARTLY, (len(ran), partly)
