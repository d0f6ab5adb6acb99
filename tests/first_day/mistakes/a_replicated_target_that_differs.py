"""Targets of each rank are declared as replicated.

error: InputMismatchError
says: MseLoss | target=float32[4, 8] beginning with [0.0|target=float32[4, 8] beginning with [1.0
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
target = DTensor.from_local(torch.full((4, 8), float(rank())), mesh, [Replicate()])
F.mse_loss(model(inputs()), target).backward()
