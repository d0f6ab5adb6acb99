"""`functional_call` and `torch.autograd.grad` give the numbers of one device."""

import copy

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
single = copy.deepcopy(model)
parallelize(model, plan(mesh))
with torch.no_grad():
    twice = [{name: p * 2 for name, p in each.named_parameters()} for each in (model, single)]
found, expected = (torch.func.functional_call(m, p, (inputs(),)) for m, p in zip((model, single), twice))
torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, expected)
found, expected = (torch.autograd.grad((m(inputs()) ** 2).mean(), list(m.parameters())) for m in (model, single))
for mine, other in zip(found, expected):
    torch.testing.assert_close(mine.full_tensor(), other)
