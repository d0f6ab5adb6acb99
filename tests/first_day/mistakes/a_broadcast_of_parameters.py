"""Parameters are broadcast from rank 0, as without any library.

error: OpPlacementError
says: broadcast | remove the collective
"""

import torch.distributed as dist

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
