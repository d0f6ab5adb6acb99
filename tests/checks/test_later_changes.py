"""What the script changes on some ranks only after the first forwards: a parameter is frozen, whose gradient would be a sum
over the others; a scheduler sets another learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.checks import InputMismatchError
from vescale.errors import OrderMismatchError
from vescale.fsdp import fully_shard


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    if kind == "fully_shard":
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan = Plan(mesh)
    if kind == "tp":
        plan.shard("0.(weight|bias)", Shard(0)).shard("2.weight", Shard(1)).shard("2.<out>", Replicate())
    else:
        plan.shard("<in>", Shard(0))
    return parallelize(model, plan.zero(3, axis="x") if kind == "zero" else plan)


def train(kind: str, first: int, only: int | None) -> None:
    """From step ``first`` on, a parameter is frozen for three steps, on all ranks or on one."""
    model, x = model_of(kind), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        if only in (None, dist.get_rank()) and step in (first, first + 3):
            model[2].weight.requires_grad_(step != first)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert only is not None or (model[2].weight.grad is None) == (first <= step < first + 3)
        optimizer.step()


def frozen_on_a_rank(kind: str) -> None:
    with pytest.raises((InputMismatchError, OrderMismatchError), match=r"False of 2\.weight on rank 1"):
        train(kind, 6, 1)


KINDS = ["dp", "tp", "zero", "fully_shard"]


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_on_a_rank(ranks: RankPools, kind: str) -> None:
    ranks.run(frozen_on_a_rank, kind, world_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_on_all_ranks(ranks: RankPools, kind: str) -> None:
    ranks.run(train, kind, 6, None, world_size=2)
    ranks.run(train, kind, 1, None, world_size=2)


def another_rate(kind: str, only: int | None) -> None:
    """As ReduceLROnPlateau sets it by each rank's own loss."""
    model, x = model_of(kind), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for step in range(12):
        if only in (None, dist.get_rank()) and step >= 6:
            optimizer.param_groups[0].update(lr=0.1 / step, betas=(0.9, 0.99))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if only is not None and step == 7:
            raise AssertionError("two steps at other rates")


def another_rate_on_a_rank(kind: str) -> None:
    with pytest.raises(
        InputMismatchError, match=r"ranks have stepped optimizers differently before forward 8.* lr of step 7"
    ):
        another_rate(kind, 1)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_another_learning_rate(ranks: RankPools, kind: str) -> None:
    ranks.run(another_rate_on_a_rank, kind, world_size=2)
    ranks.run(another_rate, kind, None, world_size=2)
