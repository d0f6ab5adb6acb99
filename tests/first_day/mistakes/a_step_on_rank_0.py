"""Only rank 0 steps the optimizer.

error: InputMismatchError
says: stepped optimizers differently | nothing on rank 1 | if rank == 0
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(inputs()).sum().backward()
    if rank() == 0:
        optimizer.step()
