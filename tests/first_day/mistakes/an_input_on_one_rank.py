"""An optional input is passed on one rank only.

error: RuntimeError
says: rank 1 | bias
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(3):
    model(inputs(), bias=torch.ones(8) if rank() == 0 else None).sum().backward()
