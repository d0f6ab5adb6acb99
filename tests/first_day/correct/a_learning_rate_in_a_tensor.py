"""The learning rate is a tensor."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    optimizer.step()
