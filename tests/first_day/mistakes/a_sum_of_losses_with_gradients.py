"""A running sum in a plain tensor keeps the graph.

error: RuntimeError
says: requires a gradient | x.detach()
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
total = torch.zeros(())
for _ in range(2):
    loss = model(inputs()).square().mean()
    loss.backward()
    total += loss
