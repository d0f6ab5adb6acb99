"""A sampler gives each rank its rows, and the plan does not say so.

error: InputMismatchError
says: the input 'x' | given="local"
"""

import torch
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

from tests.first_day.start import Net, plan, start
from vescale import ShardedBatchSampler, parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
data = TensorDataset(torch.randn(16, 8))
for (x,) in DataLoader(data, batch_sampler=ShardedBatchSampler(data, 4, mesh, "dp")):
    model(x).sum().backward()
