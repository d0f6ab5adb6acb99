"""Optimizers that step in the backward are made before `fully_shard`.

error: ParameterHookError
says: 'norm.weight' of Net has gradient hooks | Call fully_shard first
"""

import torch

from tests.first_day.start import Net, inputs, start
from vescale.fsdp import fully_shard

mesh = start(dp=2)
model = Net()
for parameter in model.parameters():
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda p, step=optimizer.step: step())
fully_shard(model, mesh=mesh["dp"])
model(inputs()).sum().backward()
