"""Gradients that take their parameters' place as they come: the same bits as by default (test_memory.py: less memory)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.examples import daily_sample
from tests.fsdp.compare import by_block, full, mesh_of, same_gradients
from tests.fsdp.models import Net, net_loss
from tests.ranks import RankPools, run_cases, run_functions
from vescale.fsdp import fully_shard

Loss = Callable[[nn.Module, int, int], torch.Tensor]


def twins(
    plain: nn.Module, mesh_shape: tuple[int, ...] | None = None, direct: bool = False, **options: Any
) -> list[Any]:
    """Two sharded copies, the first one with gradients in place; ``direct``: asked for by Linear layers, too."""
    models: list[Any] = [copy.deepcopy(plain), copy.deepcopy(plain)]
    for model in models:
        by_block(model, fully_shard, mesh_of(mesh_shape), **options)
    models[0].set_in_place_gradients()
    models[0].set_direct_linear_gradients(direct)
    return models


def buckets_of(model: Any) -> list[Any]:
    return [b for block in model.blocks for group in block._state.groups for b in group.buckets]


def watch(model: Any) -> set[int]:
    """Filled with the buckets of the blocks whose gradients take their parameters' place as they come."""
    found: set[int] = set()
    for place, bucket in enumerate(buckets_of(model)):
        overwrite = bucket.unreduced._overwrite
        bucket.unreduced._overwrite = lambda index, place=place, overwrite=overwrite: (
            found.add(place),
            overwrite(index),
        )
    return found


class Expert(nn.Module):
    """A block of which one half is used by some ranks only, and one parameter only when it is called a second time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.late = nn.Parameter(torch.randn(dim))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + torch.tanh(self.a(x))
        if (dist.get_rank() + self.calls // 2) % 2:
            x = x + torch.tanh(self.b(x))
        return x * self.late if self.calls % 2 == 0 else x


class Sublayers(nn.Module):
    """Reentrant checkpointing inside of a unit, of a layer that runs ``times`` times."""

    def __init__(self, dim: int, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = nn.Linear(dim, dim), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)
        return x


FULL, WIDE = torch.bfloat16, torch.float32
CASES: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    # name: (in place at all, options of the model, options of fully_shard)
    "plain": (True, {}, {}),
    "every layer used twice": (True, {"repeat": 2}, {}),
    "every layer used twice, direct": (False, {"repeat": 2}, {"direct": True}),
    "checkpointed": (True, {"recompute": False}, {}),
    "checkpointed, twice": (True, {"recompute": False, "repeat": 2}, {}),
    "checkpointed, reentrant": (True, {"recompute": True}, {}),
    "checkpointed, reentrant, twice": (True, {"recompute": True, "repeat": 2}, {}),
    "checkpointed inside of units, reentrant": (True, {"block": Sublayers}, {}),
    "tied": (True, {"tied": True}, {}),
    "bf16": (True, {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=FULL, reduce_dtype=FULL)}),
    "bf16, reduced in float32": (False, {}, {"mp_policy": MixedPrecisionPolicy(param_dtype=FULL, reduce_dtype=WIDE)}),
    "kept after forward": (True, {}, {"reshard_after_forward": False}),
    "a given dim": (True, {}, {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}),
    "hybrid": (True, {}, {"mesh_shape": (2, -1)}),
    "used by some ranks, and late": (False, {"block": Expert, "repeat": 2}, {}),
}


def steps(name: str) -> None:
    in_place, of_model, options = CASES[name]
    options = dict(options)
    if "mesh_shape" in options:
        options["mesh_shape"] = (2, dist.get_world_size() // 2)
    torch.manual_seed(0)
    models = twins(Net(**of_model), **options)
    seen = [watch(model) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    for step in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            net_loss(model, step, dist.get_rank()).backward()
        same_gradients(models, f"{name}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
    if in_place or "late" not in name:
        assert len(seen[0]) == (len(buckets_of(models[0])) if in_place else 0), name
    assert not seen[1]


def accumulated() -> None:
    """Without sync gradients stay in memory of their own, and so does the one that is added to them."""
    torch.manual_seed(0)
    models = twins(Net())
    for step in range(2):
        for model in models:
            model.zero_grad()
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                net_loss(model, 10 * step + micro, dist.get_rank()).backward()
        same_gradients(models, f"accumulated, step {step}")


def the_graph_is_kept() -> None:
    """A second backward through the same graph finds parameters where gradients were, as good as unmodified."""
    torch.manual_seed(0)
    models = twins(Net())
    for model in models:
        loss = net_loss(model, 0, dist.get_rank())
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(models, "retain_graph")


def kept_after_backward() -> None:
    """Parameters that stay gathered for the next forward keep their place."""
    torch.manual_seed(0)
    models = twins(Net())
    for model in models:
        model.set_reshard_after_backward(False)
        for step in range(3):
            net_loss(model, step, dist.get_rank()).backward()
    same_gradients(models, "kept after backward")


def frozen_later() -> None:
    torch.manual_seed(0)
    models = twins(Net())
    for step in range(3):
        for model in models:
            model.zero_grad()
            model.blocks[1].up.weight.requires_grad_(step == 1)
            net_loss(model, step, dist.get_rank()).backward()
        same_gradients(models, f"frozen and thawed, step {step}")


class Detached(nn.Module):
    """The last op of its backward needs a parameter to whose gradient it does not contribute."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.inner.weight.detach().sum(0).sin() * self.inner.weight.detach()[0])


def what_is_still_needed_is_not_silently_wrong() -> None:
    """RuntimeError, on all ranks; afterwards the model trains on."""
    torch.manual_seed(0)
    for block, message in ((Detached, "modified by an inplace operation"), (twice, "two gradients in one backward")):
        models = twins(Net(block=block))
        with pytest.raises(RuntimeError, match=message):
            net_loss(models[0], 0, dist.get_rank()).backward()
        models[0].reset_iter_state()
        models[0].set_in_place_gradients(False)
        for model in models:
            model.zero_grad()
            net_loss(model, 1, dist.get_rank()).backward()
        same_gradients(models, message)


def twice(dim: int) -> nn.Module:
    return Sublayers(dim, times=2)


class _Swap(torch.autograd.Function):
    """The gradient of each parameter is the other one itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = ctx.saved_tensors
        return grad, b.detach(), a.detach()


class Swap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.arange(5.0)), nn.Parameter(-torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Swap.apply(x, self.a, self.b)


def gradients_that_are_parameters() -> None:
    """By default they are held, and moved over the parameters only when none is needed any more."""
    for cut in (None, Shard(0)):  # of a alone, whose bucket is then another, in the same memory
        model: Any = Swap()
        fully_shard(model, mesh=mesh_of(), shard_placement_fn=lambda p, a=model.a, cut=cut: cut if p is a else None)
        model(torch.ones(2, requires_grad=True)).sum().backward()
        assert torch.equal(full(model.a.grad), -torch.arange(5.0)), cut
        assert torch.equal(full(model.b.grad), torch.arange(5.0)), cut


def run() -> int:
    count = run_cases(steps, daily_sample((name,) for name in CASES))
    cases = [accumulated, the_graph_is_kept, kept_after_backward, frozen_later, gradients_that_are_parameters]
    cases.append(what_is_still_needed_is_not_silently_wrong)
    return count + run_functions(cases)


@pytest.mark.parametrize("world_size", [2, 4])
def test_in_place_gradients(ranks: RankPools, world_size: int) -> None:
    ranks.run(run, world_size=world_size)
