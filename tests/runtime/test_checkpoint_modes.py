"""A program's own modes around the forward alone, or around the backward alone: recomputations of checkpointed modules see
those of the forward, and no others."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pipeline.steps import mesh_of
from tests.ranks import RankPools
from vescale import parallelize
from vescale.plans import Plan

WIDTH = 6


class Louder(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func in (torch.tanh, torch.Tensor.tanh) else result


class Quieter(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.sin.default else result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).tanh() * x.sin()) * x


def gradients(model: nn.Module, modes: list[Any], where: str) -> list[torch.Tensor]:
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with contextlib.ExitStack() as stack:
        for mode in modes if where == "forward" else ():
            stack.enter_context(mode())
        loss = model(x).sin().sum()
    with contextlib.ExitStack() as stack:
        for mode in modes if where == "backward" else ():
            stack.enter_context(mode())
        loss.backward()
    return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]


def case() -> list[Any]:
    wrong = []
    for where in ("forward", "backward"):
        for modes in ([Louder], [Quieter], [Louder, Quieter, Louder]):
            for policy in ("full", "selective", {"save": ["aten.tanh"]}, "offload"):
                found = []
                for entry in (None, policy):
                    torch.manual_seed(0)
                    model: nn.Module = nn.Sequential(Block(), Block()).double()
                    if entry is not None:
                        model = parallelize(model, Plan(mesh_of(tp=2)).checkpoint(r"\d", entry))
                    found.append(gradients(model, modes, where))
                if not all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(*found, strict=True)):
                    wrong.append((where, modes, policy))
    return wrong


def test_modes_of_the_program(ranks: RankPools) -> None:
    assert ranks.run(case, world_size=2) == [[], []]
