"""Gradients that arrive with other placements than those of their tensors: the bits of eager mode, or eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both, same
from vescale import Plan
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.scale = nn.Linear(16, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(x) * self.scale


class Summed(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum(0).mean() / 3


class Products(nn.Module):
    """Of a whole tensor and a cut one: the gradient of the whole one is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x)) * self.b(x) + self.c(x)


class Beside(nn.Module):
    """The gradient of the expanded parameter is a part of a larger tensor, with its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.sinks = nn.Linear(16, 16), nn.Parameter(torch.linspace(-1, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.a(x).view(x.shape[0], -1, 2, 8).transpose(1, 2)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], -1)
        return torch.softmax(torch.cat([heads, sinks], -1), -1)


class Widths(nn.Module):
    """The softmax of a cut dim gathers, and its gradient is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.softmax(self.up(x), -1))


class Router(nn.Module):
    """Whose weight and bias are reduced together: which element is added in which order depends on their places."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.router(x), -1)


class Hooked(Scaled):
    """Whose hook changes the gradient of a tensor inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x)
        h.register_hook(lambda grad: grad * 0.5)
        return h * self.scale


def data_plan(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("<in>", {axis: Shard(0) for axis in mesh.mesh_dim_names or ()})


def sequence_plan(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("b.<out>", Shard(1)).shard("c.<out>", Shard(1))


def width_plan(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("up.(weight|bias)", Shard(0)).shard("up.<in>", Replicate())


class SelfAttention(nn.Module):
    """A function that runs on DTensors sends three gradients of a tensor that has another use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        torch.manual_seed(0)
        return torch.nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=0.2) + torch.tanh(h)


def steps(build: Any, plan: Any, loss: str, sizes: Any = None) -> Any:
    models = both(build, plan, sizes)
    for step in range(4):
        for model in models:
            model.zero_grad()
            out = model(torch.randn(4, 34, 16, generator=torch.Generator().manual_seed(step)))
            if loss == "gradient":
                given = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
                out.backward(DTensor.from_local(given, out.device_mesh, [Replicate()], run_check=False))
            else:
                (out.square().mean() if loss == "square" else getattr(out, loss)() / 3).backward()
        for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert same(p.grad, q.grad), (step, name, report(models[1]))
    return report(models[1])


@pytest.mark.parametrize(
    ("build", "plan", "loss"),
    [
        (Scaled, data_plan, "sum"),
        (Scaled, data_plan, "gradient"),
        (Summed, data_plan, "sum"),
        (Products, sequence_plan, "square"),
        (Products, sequence_plan, "sum"),
        (Beside, data_plan, "square"),
    ],
)
def test_bits_of_eager_mode(ranks: RankPools, build: Any, plan: Any, loss: str) -> None:
    for found in ranks.run(steps, build, plan, loss, world_size=2):
        assert found.static_steps == 3 and not found.fallbacks, found


def test_places_in_buckets(ranks: RankPools) -> None:
    for found in ranks.run(steps, Router, data_plan, "square", {"dp": 2, "tp": 2}, world_size=4):
        assert found.static_steps == 3, found


def test_hooks_inside(ranks: RankPools) -> None:
    for found in ranks.run(steps, Hooked, data_plan, "square", world_size=2):
        assert "register_hook belongs to the tensor" in str(found), found


def test_a_whole_gradient_inside(ranks: RankPools) -> None:
    for found in ranks.run(steps, Widths, width_plan, "square", world_size=2):
        assert [fallback.path for fallback in found.fallbacks] == [""] and "a tensor: its gradient is placed as" in str(
            found
        ), found


def test_several_gradients_of_one_function(ranks: RankPools) -> None:
    for found in ranks.run(steps, SelfAttention, data_plan, "square", world_size=2):
        assert [fallback.path for fallback in found.fallbacks] == [""] and "sends several gradients" in str(found), (
            found
        )
