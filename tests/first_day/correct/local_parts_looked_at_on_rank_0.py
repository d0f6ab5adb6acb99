"""Only rank 0 prints and copies its parts of the parameters."""

import copy

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(inputs()).square().mean().backward()
    optimizer.step()
    if rank() == 0:
        print(model.norm.weight, [p.to_local().norm().item() for p in model.parameters()])
        copy.deepcopy({name: x.to_local() for name, x in model.state_dict().items()})
