"""A loss is divided by a number that each rank has counted in its own rows.

error: InputMismatchError
says: Div(other=3) on rank 0 and Div(other=4) on rank 1 | tokens of its own rows
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    (F.mse_loss(model(inputs()), inputs(1)) / (3 + rank())).backward()
    optimizer.step()
