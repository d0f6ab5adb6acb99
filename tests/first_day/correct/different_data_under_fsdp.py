"""With `fully_shard`, ranks bring different data, of different sizes."""

import torch

from tests.first_day.start import Net, rank, start
from vescale.fsdp import fully_shard

mesh = start(dp=2)
model = fully_shard(Net(), mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank())
for step in range(5):
    model(torch.randn(4 + rank() * step, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
