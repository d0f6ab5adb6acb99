"""Gradients are never cleared, or set to zero in place."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(inputs()).square().mean().backward()
    optimizer.step()
model.zero_grad(set_to_none=False)
model(inputs()).mean().backward()
