"""Warnings about implicit communication: one for each entry that would ask for it, with what it costs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.runtime import ImplicitCommunicationWarning, implicit_communication
from vescale.runtime._implicit_site import sent_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def one_step(plan: Plan) -> tuple[list[str], nn.Module]:
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        parallelize(model, plan)(torch.randn(4, 3, 8)).sum().backward()
    return [str(w.message) for w in seen if issubclass(w.category, ImplicitCommunicationWarning)], model


def sums_without_an_entry() -> tuple[list[str], int, list[str]]:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))

    def plan() -> Plan:
        entries = Plan(mesh).shard(r"blocks.\d+.up.(weight|bias)", Shard(0)).shard(r"blocks.\d+.down.weight", Shard(1))
        return entries.shard(r"blocks.\d+.up.<in>", Replicate())

    found, model = one_step(plan())
    repaired, _ = one_step(plan().shard(r"blocks.\d+.norm.<in:0>", Replicate()))
    return found, len(implicit_communication(model)), repaired


def test_layers_and_both_directions_are_one_warning(ranks: RankPools) -> None:
    found, sites, repaired = ranks.run(sums_without_an_entry, world_size=2)[0]
    assert sites >= 3, "every site is still counted"
    assert len(found) == 1, found
    assert r"`blocks.\d+.norm.<in:0>: {tp: R}`" in found[0]
    assert "P(sum) is a pending sum" in found[0] and "(about 384 B from each rank and call)" in found[0]
    assert repaired == []


@pytest.mark.parametrize(
    ("source", "target", "sizes", "expected"),
    [
        ([Partial()], [Replicate()], [4], 2 * 3 * 24),  # a reduce-scatter and an all-gather
        ([Partial()], [Shard(0)], [4], 3 * 24),
        ([Shard(0)], [Replicate()], [4], 3 * 96),
        ([Shard(0)], [Shard(1)], [4], 3 * 24),
        ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [4, 2], 0),
        ([Shard(0), Partial()], [Replicate(), Replicate()], [2, 4], 96 + 2 * 3 * 48),  # what was gathered is reduced
        ([Partial()], [Replicate()], [1], 0),
    ],
)
def test_bytes_of_a_report(source: list[Placement], target: list[Placement], sizes: list[int], expected: int) -> None:
    assert sent_bytes(96, source, target, sizes) == expected
