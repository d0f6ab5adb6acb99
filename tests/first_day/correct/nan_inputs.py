"""Inputs with NaN, the same on all ranks."""

import torch

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    model(torch.full((4, 8), float("nan"))).sum().backward()
