"""The optimizer is made before `parallelize`.

error: RuntimeError
says: weight | before parallelize | optimizer=
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
optimizer.step()
