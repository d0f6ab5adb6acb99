"""Labels that differ between ranks meet the output outside of the model.

error: RuntimeError
says: rank 1 | target | given="local"
"""

import torch
import torch.nn.functional as F

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    F.cross_entropy(model(inputs()), torch.full((4,), rank())).backward()
