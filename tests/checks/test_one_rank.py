"""What only one rank does to look at its model raises nothing, and others wait for nothing: a hook, a mode that counts ops,
hooks for saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.flop_counter import FlopCounterMode

import vescale
from tests.ranks import RankPools
from vescale.static import report as static_report


class Scaled(nn.Module):
    """Makes a tensor of numbers in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.5, self.training)) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def parallel(mode: str, net: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    plan.shard("<in:x>", Shard(0), mesh="dp")
    for part in ("first", "second"):
        plan.shard(f"{part}.up.weight", Shard(0), mesh="tp").shard(f"{part}.up.bias", Shard(0), mesh="tp")
        plan.shard(f"{part}.down.weight", Shard(1), mesh="tp").shard(f"{part}.down.<out>", Replicate(), mesh="tp")
    return vescale.parallelize(net or Net(), plan, mode=mode)


@contextlib.contextmanager
def hooked(model: nn.Module) -> Any:
    hooks = [part.register_forward_hook(lambda *_: None) for part in model.children()]
    yield
    for hook in hooks:
        hook.remove()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "hook": hooked,
    "mode": lambda _: FlopCounterMode(display=False),
    "saved": lambda _: saved_tensors_hooks(lambda x: x, lambda x: x),
    "nothing": lambda _: contextlib.nullcontext(),
}


def losses(mode: str, way: str, at: int) -> list[float]:
    """Of four steps; rank 0 alone does something in one of them. Each model has a mesh of its own."""
    model, found = parallel(mode), []
    labels = torch.arange(4)
    for number in range(4):
        with WAYS[way](model) if dist.get_rank() == 0 and number == at else contextlib.nullcontext():
            torch.manual_seed(number)
            loss = F.cross_entropy(model(torch.arange(16.0).view(4, 4) / 10 + number), labels) / 2
            loss.backward()
        found.append(loss.item())
    return found


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda h: (h.shape, h.dtype, h.device, h.requires_grad),
    "repr": repr,
    "mean": lambda h: h.detach().mean(),
    "sizes": lambda h: (h.size(), len(h), h.ndim, h.numel()),
}


class Looked(Net):
    """Code in the forward that looks at a tensor on the first rank, in some steps."""

    def __init__(self, way: str, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.steps, self.step = way, steps, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        h = self.first(x)
        if dist.get_rank() == 0 and self.step in self.steps:
            LOOKS[self.way](h)
        return self.second(h)


def seeded(way: str, steps: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return Looked(way, steps)


def looks_inside(mode: str) -> None:
    labels = torch.arange(4)
    for way in LOOKS:
        found = []
        for steps in ((), (0, 1), (3,), (1, 2, 4)):
            model = parallel(mode, seeded(way, steps))
            found.append([])
            for number in range(6):
                torch.manual_seed(number)
                loss = F.cross_entropy(model(torch.arange(16.0).view(4, 4) / 10 + number), labels) / 2
                loss.backward()
                found[-1].append(loss.item())
            if mode == "static":
                assert static_report(model).static_steps >= 4, (way, steps, static_report(model))
        assert all(each == found[0] for each in found), way


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_one_rank_looks_inside_of_the_forward(ranks: RankPools, mode: str) -> None:
    """A rank that repeated the forward would communicate once more, alone."""
    ranks.run(looks_inside, mode, world_size=4, timeout=120.0)


def looks(mode: str) -> None:
    expected = losses(mode, "nothing", 0)
    for way, at in (("hook", 0), ("hook", 1), ("mode", 0), ("mode", 1), ("saved", 1)):
        assert losses(mode, way, at) == expected, (way, at)


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_one_rank_looks(ranks: RankPools, mode: str) -> None:
    ranks.run(looks, mode, world_size=4, timeout=60.0)
