"""A stand-alone ``GradientReducer`` on a model that stock ``parallelize_module`` made tensor and sequence parallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.device import device_type
from tests.gradients.buckets import of_buckets
from tests.gradients.test_reducer import assert_equal_gradients
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import GradientReducer
from vescale.comm import fused_bytes, record_comms

F64 = torch.float64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.head = nn.Linear(12, 5)  # not in the plan: a plain module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.norm(x)))))


STYLES = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def train(op: str) -> None:
    """The reducer knows of dp alone; the norm's gradients are Partial over tp, too, and reduced over both at once."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    model = Mlp().to(F64)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], STYLES)
    reducer = GradientReducer(model, mesh["dp"], op=op)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, reference)]
    for step in range(3):
        whole = torch.randn(4, 6, 12, dtype=F64, generator=torch.Generator().manual_seed(step))
        own = whole.chunk(2)[dp].chunk(2, dim=1)[tp]
        for optimizer in optimizers:
            optimizer.zero_grad()
        with record_comms() as ledger:
            model(own).square().sum().backward()
        (reference(whole).square().sum() / (2 if op == "avg" else 1)).backward()
        assert_equal_gradients(model, reference)
        reduced = of_buckets(ledger)
        assert len(reduced) == reducer.num_buckets
        axes = {bucket.reduction.stages[0].axes.names for bucket in reducer.buckets}
        assert axes == {("dp",), ("dp", "tp")}
        expected = sum(fused_bytes(b.num_bytes, b.reduction.stages[0].axes.sizes) for b in reducer.buckets)
        assert sum(record.bytes for record in reduced) == expected
        (norm,) = [b for b in reducer.buckets if b.reduction.stages[0].axes.names == ("dp", "tp")]
        assert {slot.name for slot in norm.slots} == {"norm.weight", "norm.bias"}
        for optimizer in optimizers:
            optimizer.step()
    found: Any = whole_tensors(dict(model.named_parameters()))
    for a, b in zip(found.values(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_over_dp(ranks: RankPools, op: str) -> None:
    ranks.run(train, op, timeout=120)
