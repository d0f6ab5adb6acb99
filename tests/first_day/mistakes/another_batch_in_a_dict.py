"""The batch is a dict whose tensors differ between ranks.

error: RuntimeError
says: rank 1 | pixels | same
"""

import torch
from torch import nn

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        return self.net(batch["pixels"])


mesh = start(tp=2)
model = parallelize(Batched(), plan(mesh, "net."))
for _ in range(4):
    model({"pixels": torch.full((4, 8), float(rank()))}).sum().backward()
