"""A parameter's `.data` is replaced by a plain tensor, the same on every rank."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model.up.weight.data = torch.zeros(16, 8)
model(inputs()).sum().backward()
