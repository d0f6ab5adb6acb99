"""A part of the model is used in some steps only."""

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, start
from vescale import Plan, parallelize


class Two(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:  # type: ignore[override]
        output = super().forward(x)
        return output + self.extra(x) if use else output


mesh = start(dp=2)
model = parallelize(Two(), Plan(mesh).shard("<in>", Shard(0)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    optimizer.zero_grad()
    model(inputs(), use=step == 2).square().mean().backward()
    optimizer.step()
