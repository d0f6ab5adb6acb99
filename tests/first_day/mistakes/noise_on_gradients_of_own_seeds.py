"""Each rank adds noise of its own seed to gradients.

error: InputMismatchError
says: different random numbers | torch.manual_seed
"""

import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank())
for _ in range(3):
    model(inputs()).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)
    optimizer.step()
