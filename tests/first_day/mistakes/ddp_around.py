"""DDP is put around a parallelized model.

error: PlanError
says: DistributedDataParallel | call the model directly | no_sync
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.nn.parallel.DistributedDataParallel(model)(inputs()).sum().backward()
