"""fully_shard cuts the parameters over the axis over which the plan cuts the batch: both reduce the gradients.

error: FullyShardError
says: whose plan distributes it | init: Ragged, run: R | mesh['tp']
"""

import torch
from torch.distributed.tensor import Shard

import vescale
from tests.first_day.start import Net, inputs, plan, start

mesh = start(dp=2)
model = vescale.parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
model = vescale.fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(inputs()).square().mean().backward()
optimizer.step()
