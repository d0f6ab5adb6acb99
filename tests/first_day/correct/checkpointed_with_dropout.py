"""Activation checkpointing with dropout."""

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.dropout = Net(), nn.Dropout(0.5)

    def forward(self, x):
        return checkpoint(lambda h: self.dropout(self.net(h)), x, use_reentrant=False)


mesh = start(tp=2)
model = parallelize(Checkpointed(), plan(mesh, "net."))
for step in range(4):
    model(inputs(step)).sum().backward()
