"""The model is given an array of numpy, another one on each rank.

error: InputMismatchError
says: the input 'x' | an array of float32[4, 8] | given="local"
"""

import numpy as np
import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class OfArrays(Net):
    def forward(self, x: np.ndarray) -> torch.Tensor:
        return super().forward(torch.from_numpy(x))


mesh = start(tp=2)
model = parallelize(OfArrays(), plan(mesh))
model(inputs(rank()).numpy()).sum().backward()
