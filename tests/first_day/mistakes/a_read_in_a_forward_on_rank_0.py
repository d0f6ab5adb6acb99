"""The model's forward prints a value that is cut, on one rank.

error: StepMismatchError
says: rank 0 is before a read of tolist()|rank 0 is before a read of item() | (forward)) | if rank == 0
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Printing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.relu(self.up(self.norm(x)))
        if rank() == 0:
            print(hidden.tolist()[0])
        return self.down(hidden)


mesh = start(tp=2)
parallelize(Printing(), plan(mesh))(inputs()).sum().backward()
