"""Ranks of one tensor-parallel group load different data.

error: RuntimeError
says: rank 1 | x | same
"""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank()))).sum().backward()
