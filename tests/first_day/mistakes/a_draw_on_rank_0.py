"""Rank 0 draws a sample from the default generator, from which dropout draws later.

error: InputMismatchError
says: seed and state of the default generator | a sample on rank 0 | a separate torch.Generator
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


mesh = start(tp=2)
model = parallelize(Dropped(), plan(mesh))
if rank() == 0:
    print(torch.randn(3).shape)
model(inputs()).sum().backward()
