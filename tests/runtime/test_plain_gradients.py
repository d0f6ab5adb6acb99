"""Plain tensors that require a gradient among a model's outputs: penalties, inputs, heads and scales that are learned
outside of the model, and outputs that the plan has made plain."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.examples import NIGHTLY
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
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
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


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.up(x)
        return self.down(h.sin()), h.cos()


def weighted() -> None:
    """A backward of a plain tensor is given an output as its gradient."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    one = TwoHeads().double()
    for path in ("<in>", "up.weight"):
        model, found = copy.deepcopy(one), []
        parallelize(model, Plan(mesh).shard(path, Shard(0)))
        for each in (one, model):
            x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH).requires_grad_()
            output: torch.Tensor = each(x)[0]
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope, x, output, create_graph=True)
            curve.square().sum().backward()
            found.append([whole(value.detach()) for value in (curve, x.grad, each.up.weight.grad)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-11)
        one.zero_grad()


def test_outputs_as_gradients_of_plain_tensors(ranks: RankPools) -> None:
    ranks.run(weighted, world_size=2)


def drawn_loss(seed: int, leaves: list[torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Ops drawn over plain tensors with a history, leaves, and outputs; all are of one size."""
    draw = random.Random(seed)
    pairs = [torch.mul, torch.add, torch.sub, torch.minimum, torch.atan2, lambda a, b: torch.where(a > b, a.sin(), b)]
    joins = [
        lambda a, b: torch.cat([a, b]).view(2, 4, WIDTH).mean(0),
        lambda a, b: torch.stack([a, b]).logsumexp(0),
        lambda a, b: (a @ b.t()).softmax(-1) @ a,
        lambda a, b: torch.einsum("bi,bj->bij", a, b).sin().sum(-1),
        lambda a, b: nn.functional.linear(a, b[0].outer(b[1])),
        lambda a, b: a + nn.functional.layer_norm(b, (WIDTH,), a[0], a[1]),
    ]
    values = [*leaves, *(leaf.sin() for leaf in leaves), *outputs, *outputs]
    for _ in range(8):
        made = draw.choice([*pairs, *joins])(*draw.sample(values, 2))
        values.append(made if draw.random() < 0.7 else made.clamp(-2, 2))
    first: torch.Tensor = sum(x.sin().sum() for x in values)  # type: ignore[assignment]
    if seed % 2:
        (slope,) = torch.autograd.grad(first, leaves[0], create_graph=True)
        assert not isinstance(slope, DTensor)
        first = first + slope.square().mean()
    return first


def drawn(seeds: range) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    columns = {"up.(weight|bias)": Shard(0), "down.weight": Shard(1)}
    for seed in seeds:
        torch.manual_seed(seed)
        one: nn.Module = TwoHeads().double()
        entries: Any = (
            {"<in>": Shard(0), "<out:0>": Replicate()},
            {**columns, "down.<out>": Replicate()},
            {**columns, "<out:1>": Replicate()},
            {**columns, "<in>": Shard(0)},
        )[seed % 4]
        plan, model = Plan(mesh), copy.deepcopy(one)
        for path, placement in entries.items():
            plan.shard(path, placement)
        parallelize(model, plan)
        start = torch.randn(3, 4, WIDTH, dtype=torch.float64)
        found = []
        for each in (one, model):
            leaves = [leaf.clone().requires_grad_() for leaf in start]
            for _ in range(2):
                a, b = each(leaves[0])
                drawn_loss(seed, leaves, (a, b[:, :WIDTH], b[:, WIDTH:])).backward()
            assert not any(isinstance(leaf.grad, DTensor) for leaf in leaves), seed
            found.append([whole(x) for x in (*(leaf.grad for leaf in leaves), *(p.grad for p in each.parameters()))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10, msg=lambda text, seed=seed: f"seed {seed}: {text}")


def test_drawn_losses_with_learned_tensors_outside(ranks: RankPools) -> None:
    ranks.run(drawn, range(200 if NIGHTLY else 8), world_size=2)
