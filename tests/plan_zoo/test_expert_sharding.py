"""Unmodified mixtures with experts over one axis and everything at rest over the whole mesh, as docs/zoo.md writes it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.zero import mesh_of, same_steps, sharded_at_rest
from vescale import Plan, optim, parallelize, plan_zoo
from vescale.comm import record_comms
from vescale.ir import check


def documented() -> str:
    """The YAML of docs/zoo.md."""
    text = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
    (found,) = re.findall(r"```yaml\n(mesh: \{fsdp.*?)```", text, re.DOTALL)
    return f"version: 1\n{found}"


def clip(model: nn.Module, _: Any) -> None:
    is_ours = isinstance(next(model.parameters()), DTensor)
    (optim.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_)(model.parameters(), 0.5)


def on_fsdp_and_ep(name: str) -> Plan:
    return Plan.from_yaml(documented(), mesh_of({"fsdp": 2, "ep": 2}))


def on_dp_and_tp(name: str) -> Plan:
    """The zoo's plan: tensor parallelism, the sequence sharded between the layers, experts over tp. At rest everything is
    sharded over dp, and what tp leaves whole (norms and routers, whose gradients are sums over both) over tp as well."""
    plan = sharded_at_rest(plan_zoo.load(name, mesh_of({"dp": 2, "tp": 2})))
    return sharded_at_rest(plan, ".*(norm|gate).weight", "tp")


def trained(name: str, make_plan: Callable[[str], Plan]) -> dict[str, Any]:
    quiet()
    zoo = MODELS[name]
    reference, model = zoo.build().double(), zoo.build().double()
    plan = make_plan(name)
    assert check(plan, model) == ()
    parallelize(model, plan, strict=True)
    held = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]

    def step(m: nn.Module, number: int) -> torch.Tensor:
        inputs = {key: (value + number) % 60 for key, value in zoo.inputs().items()}
        loss = zoo.objective(m, inputs)
        loss.backward()
        return loss

    found = same_steps(reference, model, step, around=clip)
    with record_comms() as ledger:
        step(model, 5)
    layer = [r for r in ledger.records if r.requester == "model.layers.1"]
    return {
        "difference": found,
        "layer": Counter((r.op.removesuffix("_v"), r.axes) for r in layer),
        "reductions beside units": sum(
            ".grad" in r.requester or r.requester.startswith("bucket") for r in ledger.records
        ),
        "held": held,
        "all": sum(p.numel() for p in model.parameters()),
    }


@pytest.mark.parametrize("make_plan", [on_fsdp_and_ep, on_dp_and_tp])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_training_equals_one_device(ranks: RankPools, name: str, make_plan: Callable[[str], Plan]) -> None:
    """Routers compute in float32."""
    by_rank = ranks.run(trained, name, make_plan)
    joint, outer = ("fsdp,ep", "fsdp") if make_plan is on_fsdp_and_ep else ("dp,tp", "dp")
    assert sum(found["held"] for found in by_rank) == by_rank[0]["all"]
    for found in by_rank:
        assert found["held"] < 0.32 * found["all"]  # whole rows of tiny matrices
        difference = found["difference"]
        assert difference.loss <= 1e-6 and difference.gradient[0] <= 1e-6 and difference.parameter[0] <= 1e-6, (
            difference
        )
        assert found["layer"] == {
            (op, axes): times for axes in (joint, outer) for op, times in (("all_gather", 2), ("reduce_scatter", 1))
        }
        assert found["reductions beside units"] == 0
