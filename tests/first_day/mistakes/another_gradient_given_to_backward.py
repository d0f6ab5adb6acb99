"""The gradient that `backward` is given differs between ranks.

error: InputMismatchError
says: gradient 0 given to backward() is 1.0 on rank 0 and 2.0 on rank 1
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
F.mse_loss(model(inputs()), inputs(1)).backward(torch.tensor(1.0 + rank()))
