"""A parallelized model is traced.

error: PlanError
says: torch.jit.trace | parallelized
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.jit.trace(model, inputs())
