"""Losses are mixed by a number that each rank draws for itself.

error: InputMismatchError
says: different losses | Mul(other=
"""

import random

import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
random.seed(rank())
for _ in range(3):
    weight, output = random.random(), model(inputs())
    (weight * F.mse_loss(output, inputs(1)) + (1 - weight) * F.mse_loss(output, inputs(2))).backward()
