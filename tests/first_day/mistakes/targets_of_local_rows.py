"""Targets of this rank's rows meet outputs of the whole batch in an elementwise loss.

error: MixedTensorsError
says: DTensor.from_local | given="local"
"""

import warnings

import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

warnings.simplefilter("ignore")  # of PyTorch, about the sizes
mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
rows = inputs(rank())[:2]
F.mse_loss(model(rows), rows).backward()
