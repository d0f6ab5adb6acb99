"""Each rank draws before a forward, for itself, from generators that nobody has seeded."""

import random

import numpy as np
import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    waits = random.expovariate(1.0) + np.random.exponential()
    model(inputs() + torch.zeros(8)).sum().backward()
    assert waits > 0
