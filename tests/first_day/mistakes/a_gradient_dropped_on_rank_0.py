"""Rank 0 drops the gradient of a parameter.

error: InputMismatchError
says: number of gradients of step 1 of Adam, group 0 is 5 of 6 on rank 0 and 6 of 6 on rank 1
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    if rank() == 0:
        model.up.weight.grad = None
    optimizer.step()
