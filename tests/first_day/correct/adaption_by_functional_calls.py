"""MAML: parameters after a step take the place of those before, and gradients pass through both."""

import torch
import torch.distributed as dist
from torch.func import functional_call

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    optimizer.zero_grad()
    for task in range(2):
        values = dict(model.named_parameters())
        inner = functional_call(model, values, (inputs(step),)).square().mean()
        found = torch.autograd.grad(inner, list(values.values()), create_graph=True)
        fast = {name: value - 0.1 * g for (name, value), g in zip(values.items(), found)}
        functional_call(model, fast, (inputs(10 + task),)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
