"""Only rank 0 steps the scheduler of learning rates.

error: InputMismatchError
says: lr of step 2 of SGD | schedulers | on every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
for _ in range(3):
    model(inputs()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank() == 0:
        scheduler.step()
