"""A model that is not parallelized is trained beside, with plain data that differ."""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
other = Net()
optimizer = torch.optim.SGD(other.parameters(), 0.1)
model = parallelize(Net(), plan(mesh))
for step in range(3):
    model(inputs(step)).sum().backward()
    other(torch.full((4, 8), float(rank()))).sum().backward()
    optimizer.step()
