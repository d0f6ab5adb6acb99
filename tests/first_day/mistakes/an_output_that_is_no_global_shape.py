"""Labels have the size of the local batch.

error: RuntimeError|ValueError
says: 2 | 4
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.nn.functional.cross_entropy(model(inputs()), torch.zeros(2, dtype=torch.long)).backward()
