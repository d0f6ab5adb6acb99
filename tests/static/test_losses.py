"""The cross entropy of rows that ranks share runs on local tensors, with the bits, collectives and errors of eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tests.ranks import RankPools
from tests.static.models import both, compare
from vescale import Plan
from vescale.comm import record_comms
from vescale.errors import IndexBoundsError
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

CLASSES = 7


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x).view(-1, CLASSES), labels.view(-1))


class Summed(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x).flatten(0, 1)
        return 0.1 * F.cross_entropy(scores, labels.flatten(), ignore_index=-100, reduction="sum")


class Smoothed(Classifier):
    """What the local function does not do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x).view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def rows_over_dp(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("<in>", {"dp": Shard(0)})


def batch(step: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (rows, 3), generator=generator)
    labels[0, : 1 + step % 2] = -100  # the ranks ignore different numbers of labels
    return torch.randn(rows, 3, 5, generator=generator), labels


def steps(build: type[nn.Module]) -> Any:
    models = both(build, rows_over_dp, {"dp": 2})
    for step in range(4):
        compare(models, *batch(step))
    sizes = []
    for model in models:
        with record_comms() as ledger:
            compare((model, model), *batch(4))
        sizes.append([(record.op, record.axes, record.bytes) for record in ledger.records])
    assert sizes[0] == sizes[1] and len(sizes[0]) >= 4, sizes
    return report(models[1])


@pytest.mark.parametrize("build", [Classifier, Summed])
def test_losses_of_rows(ranks: RankPools, build: type[nn.Module]) -> None:
    for found in ranks.run(steps, build, world_size=2):
        assert found.static_steps >= 5 and not found.eager_functions, found


def test_other_arguments_run_on_dtensors(ranks: RankPools) -> None:
    for found in ranks.run(steps, Smoothed, world_size=2):
        assert found.static_steps >= 5, found


def bad_label() -> str:
    models = both(Classifier, rows_over_dp, {"dp": 2})
    for step in range(3):
        compare(models, *batch(step))
    x, labels = batch(3)
    labels[-1, 0] = CLASSES  # on the last rank
    with pytest.raises(IndexBoundsError, match="1 labels are out of bounds") as raised:
        models[1](x, labels)
    dist.barrier()
    compare(models, *batch(4))
    return str(raised.value)


def test_a_bad_label_raises_on_every_rank(ranks: RankPools) -> None:
    texts = ranks.run(bad_label, world_size=2, device="cpu")  # on a device the host does not look at labels
    assert texts[0] == texts[1]
