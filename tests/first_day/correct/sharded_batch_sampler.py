"""`ShardedBatchSampler` and a DataLoader."""

import torch
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

from tests.first_day.start import Net, plan, start
from vescale import parallelize
from vescale.rng import ShardedBatchSampler

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
data = TensorDataset(torch.randn(24, 8))
for (batch,) in DataLoader(data, batch_sampler=ShardedBatchSampler(data, 8, mesh, "dp", shuffle=True)):
    model(batch).sum().backward()
