"""``scale_grad_by_freq`` counts the rows of the whole batch, whichever ranks have them, and whichever hold the table."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from vescale import Plan, parallelize


class Table(nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, padding_idx=padding, scale_grad_by_freq=True)
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again = F.embedding(x.flip(1), self.embed.weight, self.padding, scale_grad_by_freq=True)
        return (self.embed(x) + again) * torch.arange(6.0)


def check(batch: Any, table: Any, padding: int | None, rows: int) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Table(padding)
    x = torch.randint(0, 4, (rows, 5))
    plan = Plan(mesh).shard("<in:x>", batch, mesh="dp").shard("embed.weight", table, mesh="dp")
    model = parallelize(copy.deepcopy(one), plan)
    for net in (one, model):
        y = net(x)
        (y.full_tensor() if isinstance(y, DTensor) else y).square().sum().backward()
    wanted, found = one.embed.weight.grad, model.embed.weight.grad
    assert isinstance(found, DTensor) and wanted is not None
    torch.testing.assert_close(found.full_tensor(), wanted)


def run(cases: list[tuple[Any, ...]]) -> int:
    return run_cases(check, cases)


def test_counts_are_those_of_the_batch(ranks: RankPools) -> None:
    places = [Shard(0), Shard(1), Replicate()]
    ranks.run(run, list(itertools.product(places, places, (None, 1, -8), (4, 3))), world_size=2)
