"""The model is compiled, and parallelized afterwards.

error: ForeignToolError
says: wrapped by torch.compile | model._orig_mod
"""

import torch

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
parallelize(torch.compile(Net(), backend="eager"), plan(mesh, "_orig_mod."))
