"""A buffer that is registered after `parallelize` has another value on each rank.

error: InputMismatchError
says: buffer 'factor' | on every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Scaled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


mesh = start(tp=2)
model = parallelize(Scaled(), plan(mesh))
model.register_buffer("factor", torch.tensor(1.0 + rank()))
model(inputs()).sum().backward()
