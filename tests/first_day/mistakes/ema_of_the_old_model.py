"""A copy that was made before `parallelize` is averaged with the parameters after it.

error: RuntimeError
says: DTensor
"""

import copy

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
average = copy.deepcopy(model)
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
with torch.no_grad():
    for old, new in zip(average.parameters(), model.parameters()):
        old.lerp_(new, 0.1)
