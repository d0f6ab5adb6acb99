"""All ranks run some forwards under autocast."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
        loss = model(inputs()).float().sum()
    loss.backward()
