"""A forward draws a number from Python's random, which each rank has seeded on its own.

error: InputMismatchError
says: state of Python's random | random.seed
"""

import random

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


mesh = start(tp=2)
random.seed(rank())
model = parallelize(Noisy(), plan(mesh))
model(inputs()).sum().backward()
