"""Two parameters are tied after `parallelize`, as on one device."""

import copy

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.first_day.start import start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
single = copy.deepcopy(model)
plan = Plan(mesh).shard("0.weight", Shard(0), mesh="tp").shard("1.weight", Shard(0), mesh="tp")
parallelize(model, plan.shard("0.<out>", Replicate(), mesh="tp"))
for each in (model, single):
    each[1].weight = each[0].weight
    (each(torch.arange(6).view(2, 3)) ** 2).mean().backward()
torch.testing.assert_close(model[0].weight.grad.full_tensor(), single[0].weight.grad)
