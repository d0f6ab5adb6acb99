"""Random numbers of other generators differ between ranks."""

import random

import numpy as np
import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
random.seed(rank())
np.random.seed(rank())
generator = torch.Generator().manual_seed(rank())
for _ in range(4):
    model(torch.randn(4, 8, generator=generator) * random.random()).sum().backward()
