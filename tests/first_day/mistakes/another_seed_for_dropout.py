"""Each rank seeds the generator by its rank before it trains with dropout.

error: RuntimeError
says: seed | rank 1
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(nn.Sequential(Net(), nn.Dropout(0.5)), plan(mesh, "0."))
torch.manual_seed(rank())
for _ in range(4):
    model(inputs()).sum().backward()
