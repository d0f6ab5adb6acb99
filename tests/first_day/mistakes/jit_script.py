"""A parallelized model is scripted.

error: PlanError
says: torch.jit.script | parallelized
"""

import torch

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.jit.script(model)
