"""Only rank 0 adds a penalty of the weights.

error: InputMismatchError
says: different losses | Add | if rank == 0
"""

import torch.nn.functional as F

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
loss = F.mse_loss(model(inputs()), inputs(1))
if rank() == 0:
    loss = loss + sum(p.square().sum() for p in model.parameters())
loss.backward()
model(inputs())
