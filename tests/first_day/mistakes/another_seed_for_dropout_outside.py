"""Outputs are dropped out outside of the model, under another seed on each rank.

error: InputMismatchError
says: bernoulli_ | torch.manual_seed with the same seed
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
torch.manual_seed(rank())
for step in range(2):
    F.dropout(model(inputs(step)), 0.5).sum().backward()
