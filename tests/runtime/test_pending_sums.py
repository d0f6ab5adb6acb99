"""``to_local()`` of a pending sum gives a summand, and says so where a script takes it for the value."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.errors import PendingSumWarning


class Model(nn.Module):
    """Whose forward may take the summand on purpose."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.fc, self.inside = nn.Linear(4, 4), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.fc(x)
        if self.inside:
            found.square().sum().to_local()
        return found


READS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "to_local": (lambda loss: loss.to_local(), True),
    "of what is made of it": (lambda loss: (2 * loss / 3).to_local(), True),
    "without gradient": (lambda loss: loss.detach().to_local(), True),
    "full_tensor": (lambda loss: loss.full_tensor(), False),
    "item": (lambda loss: loss.item(), False),
    "redistributed": (lambda loss: loss.redistribute(placements=[Replicate()]).to_local(), False),
    "logged": (lambda loss: f"{float(loss):.3f}", False),
    "backward": (lambda loss: loss.backward(), False),
}


def reads() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    for inside in (False, True):
        plan = Plan(mesh).shard("<in:x>", Shard(0))
        model = parallelize(Model(inside), plan)
        for name, (read, tells) in READS.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = model(torch.randn(4, 4)).square().sum()
                assert any(isinstance(p, Partial) for p in loss.placements), loss
                read(loss)
            found = [each for each in caught if each.category is PendingSumWarning]
            assert len(found) == tells and all(each.filename == __file__ for each in found), (name, inside, found)
            if tells:
                assert "full_tensor()" in str(found[0].message)
    other = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("a", "b"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PendingSumWarning)
        DTensor.from_local(torch.ones(2), other, [Replicate(), Partial()]).to_local()


def test_reads(ranks: RankPools) -> None:
    ranks.run(reads, world_size=2)
