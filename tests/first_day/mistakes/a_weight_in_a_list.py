"""The model keeps a weight in a list of its own, and computes with it.

error: ReplacedParameterError
says: 'up.weight' of Tied as it was before parallelize
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.up.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.weights[0]).mean()


mesh = start(tp=2)
model = parallelize(Tied(), plan(mesh))
model(inputs()).sum().backward()
