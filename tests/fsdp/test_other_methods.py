"""Methods beside ``forward`` that use sharded parameters: an error whose edit runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

from tests.device import device_type
from tests.ranks import RankPools
from tests.whole import whole
from vescale.errors import MixedTensorsError
from vescale.fsdp import fully_shard, register_fsdp_forward_method


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), nn.Embedding(8, 4)
        self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) @ self.weight * self.scale

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)

    def elementwise(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.weight])

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.argmax(-1))


METHODS = ("part", "product", "transposed", "elementwise", "joined", "rows")


def methods() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh(device_type(), (2,))
    x = torch.randn(3, 4)
    for name in METHODS:
        torch.manual_seed(1)
        expected = Model()
        torch.manual_seed(1)
        model = Model()
        fully_shard(model, mesh=mesh)
        call: Callable[..., Any] = getattr(model, name)
        with pytest.raises(MixedTensorsError, match=r"got mixed.*register_fsdp_forward_method\(module, .method.\)"):
            call(x)
        register_fsdp_forward_method(model, name)
        found = getattr(model, name)(x)
        assert torch.allclose(found, getattr(expected, name)(x)), name
        assert torch.allclose(whole(model.weight), expected.weight)
    with implicit_replication():
        assert torch.allclose(whole(x * model.scale), x * expected.scale)


def test_methods(ranks: RankPools) -> None:
    ranks.run(methods, world_size=2)
