"""Each rank passes its own part of the batch, and the plan says so."""

import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
optimizer = torch.optim.AdamW(model.parameters())
generator = torch.Generator().manual_seed(rank())
for _ in range(5):
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
