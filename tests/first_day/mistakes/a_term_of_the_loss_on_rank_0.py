"""Only rank 0 adds an auxiliary loss.

error: InputMismatchError
says: different losses | op 1 before the loss is Add | if rank == 0
"""

import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
for _ in range(3):
    output = model(inputs())
    loss = F.mse_loss(output, inputs(1))
    if rank() == 0:
        loss = loss + output.abs().mean()
    loss.backward()
