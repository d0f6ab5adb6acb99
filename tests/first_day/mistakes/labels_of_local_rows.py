"""Labels of this rank's rows meet outputs of the whole batch.

error: MixedTensorsError
says: cross_entropy | DTensor.from_local | given="local"
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
labels = torch.tensor([1, 2])
F.cross_entropy(model(inputs(rank())[:2]), labels).backward()
