"""A weight is pruned after `parallelize`: the numbers are those of one device."""

import copy

import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
single = copy.deepcopy(model)
parallelize(model, plan(mesh))
for each in (model, single):
    prune.l1_unstructured(each.up, "weight", 0.3)
    F.mse_loss(each(inputs()), inputs(1)).backward()
for mine, other in zip(model.parameters(), single.parameters()):
    torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
