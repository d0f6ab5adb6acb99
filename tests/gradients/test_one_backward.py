"""Backwards of one model on two threads at the same time: the second one is an error before it does anything."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.ranks import RankPools
from tests.simulate import on_other_thread
from vescale import GradientReducer, Plan, fully_shard, parallelize
from vescale.errors import GradientError


class Wait(torch.autograd.Function):
    """In its backward, calls a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call()
        return gradients[0], None


class Waiting(nn.Module):
    """Calls a function in its backward when some of the gradients are complete, and others are not."""

    call: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Wait.apply(self.before(x), self.call))


def full(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def two_threads(kind: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = Waiting()
    one = copy.deepcopy(model)
    if kind == "reducer":
        GradientReducer(model, mesh, op="sum")
    elif kind == "units":
        for part in (model.before, model.after):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        parallelize(model, Plan(mesh))
    for step in range(3):
        x, y = torch.randn(2, 2, 4, dtype=torch.float64)
        model.zero_grad()
        second = model(y).sum()
        errors: list[BaseException] = []

        def other(loss: torch.Tensor = second, errors: list[BaseException] = errors) -> None:
            with pytest.raises(GradientError, match=r"Thread-\d+ .*begins a backward of .* while MainThread"):
                loss.backward()

        model.call = functools.partial(on_other_thread, other)
        loss = model(x).square().sum()
        del model.call
        loss.backward()
        one.zero_grad()
        one(x).square().sum().backward()
        for found, parameter in zip(model.parameters(), one.parameters(), strict=True):
            assert found.grad is not None and parameter.grad is not None
            scale = dist.get_world_size() if kind == "reducer" else 1
            torch.testing.assert_close(full(found.grad), parameter.grad * scale, rtol=0, atol=1e-12, msg=f"step {step}")


@pytest.mark.parametrize("kind", ["plan", "reducer", "units"])
def test_a_second_thread_is_an_error(kind: str, ranks: RankPools) -> None:
    # On a device one thread of autograd's runs the backwards of all threads.
    ranks.run(two_threads, kind, world_size=2, device="cpu")


def sums_of_threads() -> None:
    torch.manual_seed(0)
    model = Waiting()
    one = copy.deepcopy(model)
    parallelize(model, Plan({"dp": 1}))
    x, y = torch.randn(2, 2, 4, dtype=torch.float64)
    second = model(y).sum()
    model.call = functools.partial(on_other_thread, second.backward)
    model(x).square().sum().backward()
    (one(x).square().sum() + one(y).sum()).backward()
    for found, parameter in zip(model.parameters(), one.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(full(found.grad), parameter.grad, rtol=0, atol=1e-12)


def test_without_a_reduction_gradients_of_threads_are_summed(ranks: RankPools) -> None:
    ranks.run(sums_of_threads, world_size=1, device="cpu")
