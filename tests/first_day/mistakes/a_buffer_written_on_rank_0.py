"""One rank writes to a buffer.

error: InputMismatchError
says: buffer 'factor' | if rank == 0 | on every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


mesh = start(tp=2)
model = parallelize(Scaled(), plan(mesh))
if rank() == 0:
    model.factor.mul_(2)
model(inputs()).sum().backward()
