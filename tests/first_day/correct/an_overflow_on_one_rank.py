"""A gradient overflows in one rank's part: GradScaler skips the step on every rank, as on one device."""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(3):
    scaler.scale(model(inputs(step)).square().mean()).backward()
    if step == 1 and rank() == 1:
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    before = model.up.weight.to_local().detach().clone()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == (2.0**16 if step < 1 else 2.0**15), scaler.get_scale()
    assert torch.equal(before, model.up.weight.to_local()) == (step == 1)
