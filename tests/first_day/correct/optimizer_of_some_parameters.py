"""Only the head is trained."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
model.up.requires_grad_(False)
parallelize(model, plan(mesh))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
for step in range(3):
    model(inputs(step)).sum().backward()
    optimizer.step()
