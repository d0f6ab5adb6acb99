"""One rank has a part of the model in evaluation mode.

error: InputMismatchError
says: training of module 'drop' | if rank == 0
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


mesh = start(tp=2)
model = parallelize(Dropped(), plan(mesh))
if rank() == 0:
    model.drop.eval()
model(inputs()).sum().backward()
