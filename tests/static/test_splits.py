"""Splits along dims that are whole on each rank are splits of local tensors; others run on DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare
from vescale.static import report

SPLITS = {"split", "chunk", "tensor_split", "unbind", "__iter__"}

pytestmark = pytest.mark.helper("dispatch")


class Split(nn.Module):
    """Parts of a tensor whose last dim is cut, of which not all get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def parts(self, h: torch.Tensor) -> torch.Tensor:
        first, _ = h.split([2, 3], 1)
        second, _, third = torch.chunk(h, dim=1, chunks=3)
        fourth, *_ = torch.tensor_split(h, (1, 2), 1)
        total = first.sum(1) * second.mean(1) + third.sum(1) * fourth.amax(1)
        for row in h.unbind(1):
            total = total + row
        rows = list(h)
        return torch.stack([rows[-1].sum(0), *total[:-1]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp.up(self.mlp.norm(x))
        return self.mlp.down(self.parts(h))


class SplitAlongShards(Split):
    def parts(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        return torch.cat((gate * up, up), -1)


def steps(build: type[nn.Module]) -> Any:
    models = both(build)
    for step in range(4):
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(step))
        compare(models, x)
    return report(models[1])


def test_along_a_whole_dim(ranks: RankPools) -> None:
    for found in ranks.run(steps, Split, world_size=2):
        assert found.static_steps == 3 and "" in found.static, found
        assert not SPLITS & {each.function for each in found.eager_functions}, found


def test_along_a_cut_dim(ranks: RankPools) -> None:
    for found in ranks.run(steps, SplitAlongShards, world_size=2):
        assert found.static_steps == 3 and SPLITS & {each.function for each in found.eager_functions} == {"chunk"}, (
            found
        )
