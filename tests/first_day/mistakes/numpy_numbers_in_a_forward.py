"""A forward draws from numpy.random, which each rank has seeded on its own.

error: InputMismatchError
says: have created different values | torch.tensor in the model's forward | seed random and numpy.random in the same way
"""

import numpy as np
import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.tensor(np.random.rand(8), dtype=x.dtype)


mesh = start(tp=2)
np.random.seed(rank())
model = parallelize(Noisy(), plan(mesh))
model(inputs()).sum().backward()
