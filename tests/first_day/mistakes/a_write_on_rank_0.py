"""One rank writes to a parameter that all hold.

error: InputMismatchError
says: parameter 'norm.weight' | if rank == 0 | on every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
model(inputs()).sum().backward()
