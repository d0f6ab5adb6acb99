"""A module is added after `parallelize`.

error: PlanError
says: head.weight | before parallelize
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = nn.Sequential(Net())
parallelize(model, plan(mesh, "0."))
torch.manual_seed(rank())
model.add_module("head", nn.Linear(8, 2))
for _ in range(3):
    model(inputs()).sum().backward()
