"""A schedule changes learning rates and momenta, on all ranks."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    optimizer.step()
    schedule.step()
