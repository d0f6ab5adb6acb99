"""Modules that run in eager mode inside of a static forward, and share other things with it than arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both, compare
from vescale import Plan
from vescale.static import StaticReport, report

pytestmark = pytest.mark.helper("dispatch")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Eager(Mlp):
    """Runs in eager mode, because of a hook."""

    def __init__(self, other: Mlp) -> None:
        super().__init__()
        self.others = [other]
        self.register_forward_hook(lambda *_: None)


class CallsOther(Eager):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](super().forward(x))


class UsesWeights(Eager):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.others[0]
        return super().forward(F.linear(torch.relu(F.linear(x, other.up.weight)), other.down.weight))


class CallsItself(Eager):
    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        y = super().forward(x)
        return self(x + y, times - 1) * x if times else y


class Mean(Mlp):
    """Replaces a buffer, and runs in eager mode."""

    mean: torch.Tensor

    def __init__(self, _: Mlp) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        self.mean = self.mean * 0.9 + h.detach().mean((0, 1)) * 0.1
        return self.down(torch.relu(h))


class Net(nn.Module):
    """``own`` is static, ``part`` is not; then some of them is used outside of it."""

    def __init__(self, part: type[Eager | Mean], extra: str = "") -> None:
        super().__init__()
        self.own = Mlp()
        self.part: Any = part(self.own)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.own(x) + self.part(x)
        if self.extra == "weight":
            y = y + F.linear(F.linear(x, self.part.up.weight), self.part.down.weight)
        if self.extra == "child":
            y = y + self.part.down(self.part.up(x))
        if self.extra == "buffer":
            y = y + self.own.down(self.own.up(x) * (1 + self.part.mean))
        return y


def plan_of(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    if mesh.mesh_dim_names == ("dp",):
        return plan.shard("<in>", Shard(0))
    plan.shard(r".*\.up.(weight|bias)", Shard(0)).shard(r".*\.up.<in>", Replicate())
    return plan.shard(r".*\.down.weight", Shard(1)).shard(r".*\.down.<out>", Replicate())


def steps(build: Callable[[], nn.Module], axis: str) -> StaticReport:
    models = both(build, plan_of, {axis: 2})
    for seed in range(3):
        compare(models, torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(seed)))
    return report(models[1])


PARTS: dict[str, tuple[type[Eager | Mean], str]] = {
    "calls another": (CallsOther, ""),
    "uses weights of another": (UsesWeights, ""),
    "calls itself": (CallsItself, ""),
    "its weights are used": (Eager, "weight"),
}
LEAKS: dict[str, tuple[type[Eager | Mean], str]] = {
    "its child is called": (Eager, "child"),
    "its buffer is used": (Mean, "buffer"),
}


def net(name: str) -> Net:
    return Net(*(PARTS | LEAKS)[name])


def all_cases(axis: str) -> dict[str, StaticReport]:
    return {name: steps(lambda name=name: net(name), axis) for name in PARTS | LEAKS}  # type: ignore[misc]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_modules_in_eager_mode_share_more_than_arguments(ranks: RankPools, axis: str) -> None:
    for found in ranks.run(all_cases, axis, world_size=2):
        for name in PARTS:
            assert found[name].static_steps == 2 and "own" in found[name].static, (name, found[name])
        for name in LEAKS:
            assert not found[name].static_steps and "part" in found[name].fallbacks[0].reason, (name, found[name])
