"""Only rank 0 steps, and each rank has a part of each parameter.

error: InputMismatchError
says: stepped optimizers differently | nothing on rank 1 | if rank == 0
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
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    if rank() == 0:
        optimizer.step()
