"""Inputs in containers beside strings, None and objects."""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, batch):
        return {"out": self.net(batch["x"]), "name": batch["name"]}


mesh = start(tp=2)
model = parallelize(Batched(), plan(mesh, "net."))
for step in range(4):
    batch = {"x": inputs(step), "name": f"file of rank {rank()}", "mask": None, "more": [torch.ones(2), object()]}
    model(batch)["out"].sum().backward()
