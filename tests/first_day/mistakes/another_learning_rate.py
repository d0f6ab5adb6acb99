"""Learning rates differ between ranks.

error: InputMismatchError
says: lr of step 1 of SGD, group 0 is 0.1 on rank 0 and 0.2 on rank 1 | on every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank()))
for _ in range(3):
    optimizer.zero_grad()
    model(inputs()).sum().backward()
    optimizer.step()
