"""One rank runs under autocast.

error: StepMismatchError
says: under autocast to torch.bfloat16 | on every rank|Every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
with torch.autocast("cpu", torch.bfloat16, enabled=rank() == 0):
    loss = model(inputs()).float().sum()
loss.backward()
