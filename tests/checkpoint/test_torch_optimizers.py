"""Every optimizer of torch.optim, from one device to `fully_shard` and back: the next steps are those of an unbroken run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.optim.meshes import on_mesh
from tests.ranks import RankPools
from tests.whole import whole
from vescale.checkpoint import load, save
from vescale.fsdp import fully_shard

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 2},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"foreach": True},
    "Adamax": {},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
DAILY = ("ASGD", "Adafactor")
"""Scalars that others lack, and states of other shapes than their parameter's."""
STEPS = 3


class Case:
    """A model and its optimizer after some steps of equal gradients."""

    def __init__(self, kind: str, is_sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).double()
        if is_sharded:
            fully_shard(self.model, mesh=init_device_mesh(device_type(), (2,)))
        self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), lr=0.02, **OPTIMIZERS[kind])

    def train(self, steps: range) -> None:
        for step in steps:
            for number, parameter in enumerate(self.model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = gradient
                if isinstance(parameter, DTensor):
                    parameter.grad = on_mesh(gradient, parameter.device_mesh, parameter.placements)
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter.detach()) for name, parameter in self.model.named_parameters()}


def to_other_engines(folder: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    for source, target in ((False, True), (True, False), (True, True)):
        before, after = Case(kind, source), Case(kind, target)
        before.train(range(STEPS))
        path = f"{folder}/{source}-{target}"
        save(path, model=before.model, optimizer=before.optimizer)
        load(path, model=after.model, optimizer=after.optimizer)
        for case in (before, after):
            case.train(range(STEPS, STEPS + 2))
        for name, value in before.values().items():
            torch.testing.assert_close(after.values()[name], value, rtol=1e-13, atol=1e-14, msg=f"{kind}: {name}")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in DAILY else pytest.mark.slow) for k in OPTIMIZERS])
def test_every_optimizer(ranks: RankPools, tmp_path: Path, kind: str) -> None:
    ranks.run(to_other_engines, str(tmp_path), kind, world_size=2)
