"""The input is overwritten between forward and backward, which needs it.

error: RuntimeError
says: modified by an inplace operation
"""

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.first_day.start import inputs, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
entries = Plan(mesh).shard("0.(weight|bias)", Shard(0)).shard("1.weight", Shard(1)).shard("1.<out>", Replicate())
parallelize(model, entries)
x = inputs()
output = model(x)
x.mul_(0)
output.sum().backward()
