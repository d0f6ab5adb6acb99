"""A module is added after `parallelize`.

error: RuntimeError
says: head | before
open: plain parameters that come later are not looked for
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
