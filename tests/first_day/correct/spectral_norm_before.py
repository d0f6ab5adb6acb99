"""A weight gets its spectral norm before `parallelize`: the numbers are those of one device."""

import copy

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrizations import spectral_norm

from tests.first_day.start import Net, inputs, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = Net()
spectral_norm(model.up)
single = copy.deepcopy(model)
parallelize(model, Plan(mesh).shard("<in>", Shard(0)))
for each in (model, single):
    F.mse_loss(each(inputs()), inputs(1)).backward()
for mine, other in zip(model.parameters(), single.parameters()):
    torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
