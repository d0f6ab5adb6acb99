"""Parts of the model are in evaluation mode on all ranks, and buffers change in training."""

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.running = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.running(self.frozen(super().forward(x)))


mesh = start(dp=2, tp=1)
model = parallelize(Normed(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
model.frozen.eval()
for step in range(5):
    model(inputs(step)).sum().backward()
