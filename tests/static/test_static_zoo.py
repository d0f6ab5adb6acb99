"""Every model of the zoo gives the same bits in static mode and in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from vescale import parallelize, plan_zoo
from vescale.static import StaticReport, report

pytestmark = pytest.mark.helper("dispatch")
NUM_STEPS = 3


def compare(name: str, sizes: dict[str, int]) -> tuple[list[tuple[int, str]], StaticReport]:
    quiet()
    case = MODELS[name]
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(3)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in case.inputs().items()}
    if case.package == "diffusers":
        rows = [Shard(0) if axis == "dp" else Replicate() for axis in sizes]
        inputs = {k: distribute_tensor(v, mesh, rows) for k, v in inputs.items()}
    models = {mode: case.build().float() for mode in ("eager", "static")}
    for mode, model in models.items():
        parallelize(model, plan_zoo.load(name, mesh), mode=mode)

    def step(model: Any, seed: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        loss = case.objective(model, inputs)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    differing = []
    for seed in range(NUM_STEPS):
        expected, found = step(models["eager"], seed), step(models["static"], seed)
        differing += [(seed, key) for key in expected if key not in found or not _is_same(found[key], expected[key])]
    return differing, report(models["static"])


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.placements == b.placements and torch.equal(a._local_tensor, b._local_tensor)
    return torch.equal(a, b)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_bits_as_eager_mode(ranks: RankPools, name: str) -> None:
    MODELS[name].need()
    for differing, found in ranks.run(compare, name, {"dp": 1, "tp": 2}, world_size=2):
        assert not differing
        assert found.static_steps == NUM_STEPS - 1, found
        assert not found.fallbacks, found
