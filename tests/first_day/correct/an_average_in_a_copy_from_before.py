"""A copy that was made before `parallelize` is averaged with the parameters after it: plain tensors are global ones."""

import copy

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


def train(model: nn.Module, average: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(step)).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1)
    return list(average.parameters())


mesh = start(tp=2)
model = Net()
one_device, average, expected = (copy.deepcopy(model) for _ in range(3))
parallelize(model, plan(mesh))
torch.testing.assert_close(train(model, average), train(one_device, expected))
