"""Views of parameters and gradients are written to, by the script and by torch.optim.Muon, in a program that calls
fully_shard alone."""

import copy
import warnings

import torch
from torch import nn

from tests.first_day.start import start
from vescale import fully_shard

warnings.simplefilter("ignore")  # of gathers
mesh = start(dp=2)
model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False))
one = copy.deepcopy(model)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizers = [torch.optim.Muon(net.parameters(), lr=0.1) for net in (model, one)]
x = torch.randn(4, 6)
for _ in range(3):
    for net, optimizer in zip((model, one), optimizers):
        net(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p.grad.T.mul_(0.5)
                p.grad[0].add_(1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in net.parameters():
                p.T.div_(2)
                p[1:3].add_(1)
                p.view(-1)[4].zero_()
    for p, q in zip(model.parameters(), one.parameters()):
        torch.testing.assert_close(p.full_tensor(), q)
