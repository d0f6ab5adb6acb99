"""One rank sums the loss, and the others take its mean.

error: InputMismatchError
says: different losses | MseLoss(reduction=1 | MseLoss(reduction=2
"""

import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
F.mse_loss(model(inputs()), inputs(1), reduction="sum" if rank() else "mean").backward()
