"""A sharded output meets a plain tensor that differs between ranks.

error: RuntimeError
says: DTensor | plain|global
open: the error is PyTorch's
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
(model(inputs()) + torch.ones(4, 8)).sum().backward()
raise SystemExit(0)
