"""Dropout has another probability on each rank.

error: InputMismatchError
says: p of module 'drop' | hyperparameter | on every rank
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1 * (1 + rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


mesh = start(tp=2)
model = parallelize(Dropped(), plan(mesh))
model(inputs()).sum().backward()
