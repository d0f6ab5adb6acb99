"""A static forward that cannot go on leaves buffers and inputs as they were: the step runs again in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.whole import whole
from vescale import parallelize
from vescale.plans import Plan
from vescale.static import report

WIDTH = 6


class Counting(nn.Module):
    """Writes, and then does what the recorded step did not do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("cache", torch.zeros(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.kind == "no gradient":
                self.seen.add_(x.detach().sum(0))
            elif self.kind == "view":
                self.seen[1:].mul_(0.5).add_(1)
            elif self.kind == "input":
                x.mul_(2)
            elif self.kind == "large":
                self.cache.add_(1)
            elif self.kind == "parameter":
                self.linear.bias.add_(1)
        y = self.norm(self.linear(x)) * (1 + self.seen) + self.cache[0, :WIDTH]
        if not isinstance(y, DTensor):  # so it is in static mode
            y = y + 0 * y.untyped_storage().nbytes()
        return y


def writes(kind: str) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = Counting(kind).double()
    model: Any = copy.deepcopy(one)
    parallelize(model, Plan(mesh).shard("<in>", Shard(0), mesh="dp"), mode="static")
    for step in range(4):
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        given = x.clone()
        expected, found = one(x), model(given)
        torch.testing.assert_close(whole(found.detach()), expected.detach(), rtol=1e-10, atol=1e-12)
        for each in (expected, found):
            each.square().sum().backward()
        for (name, own), other in zip(model.named_buffers(), one.buffers(), strict=True):
            torch.testing.assert_close(whole(own), other, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        if kind == "input":
            torch.testing.assert_close(given, x)
    assert report(model).fallbacks, "the static forward is to be given up"


def all_writes() -> int:
    return run_cases(writes, [("no gradient",), ("view",), ("input",), ("large",), ("parameter",)])


@pytest.mark.helper("dispatch")
def test_writes_of_a_forward_that_cannot_go_on(ranks: RankPools) -> None:
    ranks.run(all_writes, world_size=2)
