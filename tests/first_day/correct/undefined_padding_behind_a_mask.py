"""A loss over rows in a buffer whose padding is undefined, and is masked."""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
mask = torch.arange(6) < torch.tensor([[6], [3]])
for step in range(4):
    padded = torch.empty(2, 6, 8).fill_(rank())  # as memory that was used before
    y = model(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)))
    padded[mask] = y.full_tensor()[mask]
    torch.where(mask[..., None], padded, 0.0).square().sum().backward()
