"""Learning rates differ between ranks.

error: InputMismatchError
says: parameter 'norm.weight' | another learning rate | on every rank
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
