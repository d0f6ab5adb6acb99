"""Moments of AdamW of one device are loaded, and the next step is the same."""

import copy

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
single = Net().double()
model = copy.deepcopy(single)
optimizer = torch.optim.AdamW(single.parameters())
for _ in range(2):
    (single(inputs().double()) ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
parallelize(model, plan(mesh))
model.load_state_dict(single.state_dict())
other = torch.optim.AdamW(model.parameters())
other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
for each, stepped in ((single, optimizer), (model, other)):
    (each(inputs().double()) ** 2).sum().backward()
    stepped.step()
for found, expected in zip(model.parameters(), single.parameters()):
    torch.testing.assert_close(found.full_tensor(), expected)
