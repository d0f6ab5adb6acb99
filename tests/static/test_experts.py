"""Experts, and generation with caches, in static mode: the bits of eager mode, and a reason for what falls back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.device import device_type
from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.test_experts import Mixture, entries
from tests.runtime.test_generate import build
from tests.static.models import both, compare
from vescale import Plan, parallelize, plan_zoo
from vescale.static import StaticReport, report

pytestmark = pytest.mark.helper("dispatch")


def experts(dispatch: str, tokens: str) -> StaticReport:
    def plan(mesh: DeviceMesh) -> Plan:
        made = Plan(mesh)
        entries("experts", dispatch, tokens)(made)
        return made

    models = both(lambda: Mixture(None, False).double(), plan, {"ep": 2})
    for step in range(3):
        length = 6 if tokens == "sequence" else 6 + 2 * step  # flattened, a cut sequence is one with gaps
        x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        compare(models, x, seed=step)
    return report(models[1])


@pytest.mark.parametrize(
    ("dispatch", "tokens"), [("mask", "whole"), ("all_to_all", "whole"), ("all_to_all", "sequence")]
)
def test_experts(ranks: RankPools, dispatch: str, tokens: str) -> None:
    for found in ranks.run(experts, dispatch, tokens, world_size=2):
        assert found.static_steps == 2 and {"", "experts"} <= set(found.static), found
        assert not found.fallbacks, found


def generations(cache: str | None) -> StaticReport:
    quiet()
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    models: list[Any] = [
        parallelize(build("llama"), plan_zoo.load("llama", mesh), mode=mode) for mode in ("eager", "static")
    ]
    ids = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    eager, static = (
        model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation=cache) for model in models
    )
    assert torch.equal(eager, static)
    return report(models[1])


@pytest.mark.parametrize("cache", [None, "static"])
def test_generations_with_caches_run_in_eager_mode(ranks: RankPools, cache: str | None) -> None:
    for found in ranks.run(generations, cache, world_size=2):
        assert "Cache, which may hold tensors" in str(found), found
