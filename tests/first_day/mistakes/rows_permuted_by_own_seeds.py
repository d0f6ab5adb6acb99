"""Rows of outputs are permuted by each rank's own seed.

error: InputMismatchError
says: indices of index | rank 1
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
torch.manual_seed(rank())
F.mse_loss(model(inputs())[torch.randperm(4)], inputs(1)).backward()
