"""Each rank has a seed of its own, and a model of `fully_shard` is initialized after it was sharded.

error: InputMismatchError
says: seed 0 | seed 1 | torch.manual_seed with the same seed | normal_
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, rank, start
from vescale.fsdp import fully_shard

mesh = start(dp=2)
model = fully_shard(Net(), mesh=mesh["dp"])
torch.manual_seed(rank())
for parameter in model.parameters():
    nn.init.normal_(parameter)
model(inputs()).sum().backward()
