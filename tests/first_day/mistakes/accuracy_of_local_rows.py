"""An accuracy of outputs of the whole batch and of labels of this rank's rows.

error: MixedTensorsError
says: eq of a DTensor | DTensor.from_local
"""

import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
print((model(inputs(rank())[:2]).argmax(-1) == torch.tensor([1, 2])).float().mean().item())
