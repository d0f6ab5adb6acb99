"""Only rank 0 computes the norm of an optimizer's state for its log.

error: StepMismatchError
says: linalg_vector_norm | if rank == 0
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    model(inputs()).sum().backward()
    optimizer.step()
    if rank() == 0:
        print(float(optimizer.state[model.up.weight]["exp_avg"].norm()))
