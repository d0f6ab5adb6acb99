"""Several backwards before a step, with `no_sync` for all but the last."""

import contextlib

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import no_sync, parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    with no_sync(model) if step % 2 == 0 else contextlib.nullcontext():
        model(inputs(step)).sum().backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
