"""A number in a dataclass that is given to the model differs between ranks.

error: InputMismatchError
says: 'batch.scale' | 1.0 on rank 0 and 2.0 on rank 1
"""

from dataclasses import dataclass

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


@dataclass
class Batch:
    x: torch.Tensor
    scale: float


class OfBatches(Net):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch.x, batch.scale)


mesh = start(tp=2)
model = parallelize(OfBatches(), plan(mesh))
model(Batch(inputs(), 1.0 + rank())).sum().backward()
