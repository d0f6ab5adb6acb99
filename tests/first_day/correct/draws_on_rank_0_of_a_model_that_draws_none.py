"""Rank 0 draws a sample from the default generator; the model draws nothing."""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    if rank() == 0:
        print(torch.randn(3).shape)
    model(inputs()).sum().backward()
