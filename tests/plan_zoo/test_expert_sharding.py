"""Unmodified mixtures with experts over one axis and everything at rest over the whole mesh, as docs/zoo.md writes it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.zero import mesh_of, same_steps
from vescale import Plan, optim, parallelize
from vescale.comm import record_comms

SIZES = {"fsdp": 2, "ep": 2}


def documented() -> str:
    """The YAML of docs/zoo.md."""
    text = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    (found,) = re.findall(r"```yaml\n(mesh: \{fsdp.*?)```", text, re.DOTALL)
    return f"version: 1\n{found}"


def clip(model: nn.Module, _: Any) -> None:
    is_ours = isinstance(next(model.parameters()), DTensor)
    (optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_)(model.parameters(), 0.5)


def trained(name: str) -> dict[str, Any]:
    quiet()
    zoo = MODELS[name]
    reference, model = zoo.build().double(), zoo.build().double()
    parallelize(model, Plan.from_yaml(documented(), mesh_of(SIZES)), strict=True)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]

    def step(m: nn.Module, number: int) -> torch.Tensor:
        inputs = {key: (value + number) % 60 for key, value in zoo.inputs().items()}
        loss = zoo.objective(m, inputs)
        loss.backward()
        return loss

    found = same_steps(reference, model, step, around=clip)
    with record_comms() as ledger:
        step(model, 5)
    layer = [r for r in ledger.records if r.asker == "model.layers.1"]
    return {
        "difference": found,
        "layer": Counter((r.op.removesuffix("_v"), r.axes) for r in layer),
        "held": held,
        "all": sum(p.numel() for p in model.parameters()),
    }


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_training_equals_one_device(ranks: RankPools, name: str) -> None:
    """Routers compute in float32."""
    by_rank = ranks.run(trained, name)
    assert sum(found["held"] for found in by_rank) == by_rank[0]["all"]
    for found in by_rank:
        assert found["held"] < 0.32 * found["all"]  # whole rows of tiny matrices
        difference = found["difference"]
        assert difference.loss <= 1e-6 and difference.gradient[0] <= 1e-6 and difference.parameter[0] <= 1e-6, (
            difference
        )
        assert found["layer"] == {
            (op, axes): times
            for axes in ("fsdp,ep", "fsdp")
            for op, times in (("all_gather", 2), ("reduce_scatter", 1))
        }
