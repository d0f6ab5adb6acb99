"""Learning rates differ between ranks that have nothing in common but the optimizer.

error: InputMismatchError
says: lr of step 1 of SGD, group 0 is 0.1 on rank 0 and 0.2 on rank 1
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.first_day.start import inputs, rank, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
entries = Plan(mesh).shard("0.<in>", Replicate()).shard("0.weight", Shard(0)).shard("2.weight", Shard(1))
parallelize(model, entries.shard("2.<out>", Replicate()))
optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + rank()))
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    optimizer.step()
