"""Rank 0 scales its part of a parameter.

error: InputMismatchError
says: number of writes to 'up.weight' is 1 on rank 0 and 0 on rank 1 | if rank == 0
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
with torch.no_grad():
    if rank() == 0:
        model.up.weight.mul_(2)
model(inputs()).sum().backward()
