"""Gradients are averaged by the script, as without any library.

error: RuntimeError
says: already global | remove the collective
"""

import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model(inputs()).sum().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
