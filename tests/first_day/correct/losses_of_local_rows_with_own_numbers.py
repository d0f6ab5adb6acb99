"""Each rank computes with its own rows of the output, as it likes."""

import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    local = model(inputs()).to_local()
    loss = local.sum() * (1 + rank()) / 3
    if rank() == 0:
        loss = loss + local[0].sum()
    loss.backward()
    optimizer.step()
