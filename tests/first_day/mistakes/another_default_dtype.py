"""One rank builds the model in another default dtype.

error: PlanMismatchError
says: (8,) float32 on rank 0 and (8,) float64 on rank 1 | build the same model
"""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
if rank():
    torch.set_default_dtype(torch.float64)
parallelize(Net(), plan(mesh))
