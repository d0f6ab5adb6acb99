"""A parameter is replaced by a plain one after `parallelize`.

error: PlanError
says: up.weight | DTensor | before
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model.up.weight = nn.Parameter(torch.zeros(16, 8))
for _ in range(3):
    model(inputs()).sum().backward()
