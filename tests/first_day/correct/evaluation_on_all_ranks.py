"""All ranks evaluate between steps, with other sizes."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(5):
    model(inputs(step)[: 2 + step % 3]).sum().backward()
    model.eval()
    with torch.no_grad():
        model(inputs(step)[:1])
    model.train()
