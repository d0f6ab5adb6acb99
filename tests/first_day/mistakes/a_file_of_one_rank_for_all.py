"""Rank 0 saves its parts with `torch.save`, and all ranks load them.

error: InputMismatchError
says: another rank has written | vescale.checkpoint.save
"""

import os

import torch
import torch.distributed as dist

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
path = os.environ["VESCALE_REPORTS"] + "/model.pt"
if rank() == 0:
    torch.save(model.state_dict(), path)
dist.barrier()
model.load_state_dict(torch.load(path, weights_only=False))
