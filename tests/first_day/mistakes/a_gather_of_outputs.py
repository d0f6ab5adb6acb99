"""Outputs are gathered by the script, as with DDP.

error: OpPlacementError
says: allgather | already global | remove the collective
"""

import torch
import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
parts = [torch.empty(4, 8) for _ in range(2)]
dist.all_gather(parts, model(inputs()))
