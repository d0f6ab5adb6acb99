"""A forward leaves out a layer by a number from Python's random, which nobody has seeded; nothing else is drawn from it.

error: InputMismatchError
says: state of Python's random | random.seed
"""

import random

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if random.random() < 0.5 else y + x


mesh = start(tp=2)
random.seed(1 + rank())  # of which the first numbers are 0.13 and 0.96
model = parallelize(Dropped(), plan(mesh))
model(inputs()).sum().backward()
