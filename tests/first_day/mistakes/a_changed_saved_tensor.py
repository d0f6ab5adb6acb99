"""A tensor that backward needs is changed in place.

error: RuntimeError
says: modified by an inplace operation
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
out = torch.sigmoid(model(inputs()))
loss = out.sum()
out.mul_(2)
loss.backward()
