"""Norms of gradients are part of the loss."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(3):
    model.zero_grad()
    loss = model(inputs()).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
