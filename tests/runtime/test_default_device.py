"""``torch.set_default_device`` and ``with device:`` around a parallelized model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.runtime.llama import make_mesh
from vescale import Plan, parallelize
from vescale.static import report


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.found: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.append(torch.empty(()).device.type)
        return self.linear(x)


def in_a_region() -> None:
    plan = Plan(make_mesh(dp=dist.get_world_size())).local("0", inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})
    model: Any = parallelize(nn.Sequential(Asks(), nn.Tanh()), plan)
    with torch.device("meta"):
        model(torch.ones(4, 4, device=device_type())).sum().backward()
    assert model[0].found == ["meta"]


def in_static_mode() -> None:
    model: Any = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Plan(make_mesh(dp=2)), mode="static")
    with torch.device(device_type()):
        for _ in range(3):
            model(torch.ones(4, 4)).sum().backward()
    assert report(model).static_steps == 2, report(model)


@pytest.mark.parametrize("case", [in_a_region, pytest.param(in_static_mode, marks=pytest.mark.helper("dispatch"))])
def test_a_default_device(ranks: RankPools, case: Callable[[], None]) -> None:
    """Tensors are made there in local regions, too, and steps are static."""
    ranks.run(case, world_size=2)
