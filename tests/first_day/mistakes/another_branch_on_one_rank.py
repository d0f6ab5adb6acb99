"""A branch on rank-dependent data runs another module.

error: RuntimeError
says: rank 1 | down
"""

from torch import nn

from tests.first_day.start import Net, inputs, rank, start
from vescale.fsdp import fully_shard


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Net(), Net()

    def forward(self, x, which):
        return self.down(x) if which else self.up(x)


mesh = start(dp=2)
model = Choice()
for child in (model.up, model.down):
    fully_shard(child, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
for _ in range(3):
    model(inputs(), rank()).sum().backward()
