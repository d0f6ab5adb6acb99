"""Plain tensors that differ between ranks are loaded.

error: RuntimeError
says: up.weight | rank 1 | same
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.manual_seed(rank())
model.load_state_dict(Net().state_dict())
for _ in range(3):
    model(inputs()).sum().backward()
