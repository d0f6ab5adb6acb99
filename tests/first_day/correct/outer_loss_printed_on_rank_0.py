"""Only rank 0 prints a loss that is computed outside of the model."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
for _ in range(3):
    loss = F.cross_entropy(model(inputs()), torch.arange(4))
    loss.backward()
    if rank() == 0:
        print(loss.item(), f"{loss:.3f}", loss)
