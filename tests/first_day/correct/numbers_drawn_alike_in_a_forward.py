"""A forward draws from all generators, which are seeded alike; ranks draw others for themselves."""

import random

import numpy as np
import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * random.random() + torch.tensor(np.random.rand(8), dtype=x.dtype)
        return nn.functional.dropout(y, 0.5)


mesh = start(tp=2)
random.seed(0)
np.random.seed(0)
model = parallelize(Noisy(), plan(mesh))
own, numbers = torch.Generator().manual_seed(rank()), random.Random(rank())
for _ in range(4):
    torch.randn(1 + rank(), generator=own), [numbers.random() for _ in range(rank())]
    model(inputs()).sum().backward()
