"""This rank's part of the batch is overwritten between forward and backward, which needs it.

error: RuntimeError
says: modified by an inplace operation
"""

from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(nn.Linear(8, 4), Plan(mesh).shard("<in>", Shard(0), given="local"))
x = inputs(rank())
output = model(x)
x.mul_(0)
output.sum().backward()
