"""The optimizer is made before `fully_shard`.

error: RuntimeError
says: weight | fully_shard | before
"""

import torch

from tests.first_day.start import Net, inputs, start
from vescale.fsdp import fully_shard

mesh = start(dp=2)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
fully_shard(model, mesh=mesh["dp"])
model(inputs()).sum().backward()
optimizer.step()
