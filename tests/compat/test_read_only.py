"""What libraries get of a DTensor of which other ranks have parts is a copy: writes to it raise, for they would be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.errors import DTensorStorageError

ARRAYS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "data": lambda x: x.data.numpy(),
}


class Writing(nn.Linear):
    read: Callable[[Any], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.read is not None:
            self.read(self.weight)[0] += 1
        return super().forward(x)


def read(placement: Any) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = Writing(4, 6)
    torch.manual_seed(0)
    model: Any = parallelize(Writing(4, 6), Plan(mesh).shard("weight", placement))
    for array in ARRAYS.values():
        found = array(model.weight)
        np.testing.assert_array_equal(found, plain.weight.detach().numpy())
        for each in (plain, model):
            each.read = array
        if isinstance(placement, Shard):
            with pytest.raises(ValueError, match="read-only"):
                found[0] += 1
            with pytest.raises(ValueError, match="read-only"):
                model(torch.ones(2, 4))
            continue
        x = torch.ones(2, 4)
        torch.testing.assert_close(model(x).full_tensor(), plain(x))  # the array is this rank's memory
    assert isinstance(model.weight, DTensor)
    with pytest.raises(DTensorStorageError, match=r"dlpack\(\) of a DTensor.*to_local"):
        torch.from_dlpack(model.weight.detach())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_arrays(ranks: RankPools, placement: Any) -> None:
    ranks.run(read, placement, world_size=2)
