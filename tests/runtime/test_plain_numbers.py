"""Plain numbers that require a gradient among a model's outputs: penalties, and scales that are learned outside of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.plans import Plan

WIDTH = 6


class Critic(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return checkpoint(self.score, h, use_reentrant=False) if self.is_checkpointed else self.score(h)

    def score(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h).sin() * h


def step(model: nn.Module, scale: torch.Tensor) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    loss = output.square().mean() * scale.exp() + slope.square().sum() * scale.sin() + scale
    loss.backward()
    gradients = [x.grad, scale.grad]
    assert not any(isinstance(gradient, DTensor) for gradient in gradients)
    found: list[Any] = [loss.detach(), *gradients, *(p.grad for p in model.parameters())]
    return [whole(tensor).clone() for tensor in found]


def same(is_checkpointed: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    one: nn.Module = Critic(is_checkpointed).double()
    for entries in (
        {"<in>": Shard(0)},
        {"linear.weight": Shard(0)},
        {"<in>": Shard(0), "linear.<out>": Shard(1)},
        {"linear.weight": Shard(0), "norm.<in>": Shard(0)},
    ):
        plan, model = Plan(mesh), copy.deepcopy(one)
        for path, placement in entries.items():
            plan.shard(path, placement)
        parallelize(model, plan)
        scales = [torch.tensor(0.5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        for _ in range(2):  # gradients add up, and the leaf has its hook
            for a, b in zip(step(one, scales[0]), step(model, scales[1]), strict=True):
                torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-11)
        one.zero_grad()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gradients_are_plain(ranks: RankPools, is_checkpointed: bool) -> None:
    """The penalty's gradient was a DTensor, and came to the local tensors behind an entry inside of another DTensor."""
    ranks.run(same, is_checkpointed, world_size=2)
