"""Gradients are clamped by hooks that are registered after `parallelize`, as on one device."""

import copy

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
single = copy.deepcopy(model)
parallelize(model, plan(mesh))
for parameter in (*model.parameters(), *single.parameters()):
    parameter.register_hook(lambda gradient: gradient * 2)
model(inputs()).sum().backward()
single(inputs()).sum().backward()
for found, expected in zip(model.parameters(), single.parameters()):
    torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
