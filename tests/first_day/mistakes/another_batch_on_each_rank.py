"""A `DistributedSampler` gives each rank its own batch, which the plan takes for the global one.

error: RuntimeError
says: given="local" | rank 1 | x
"""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
generator = torch.Generator().manual_seed(rank())
for _ in range(4):
    model(torch.randn(4, 8, generator=generator)).sum().backward()
    optimizer.step()
