"""Each rank makes DTensors of its own rows, and of their targets."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    rows, targets = (DTensor.from_local(inputs(seed + rank())[:2], mesh, [Shard(0)]) for seed in (0, 5))
    F.mse_loss(model(rows), targets).backward()
    optimizer.step()
