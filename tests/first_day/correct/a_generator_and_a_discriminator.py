"""Two models are trained against each other."""

import torch
import torch.nn.functional as F

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
generator, judge = (parallelize(Net(), plan(mesh)) for _ in range(2))
optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, judge)]
for step in range(4):
    fake = generator(inputs(step))
    optimizers[1].zero_grad()
    (F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(inputs(9))).mean()).backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    optimizers[0].step()
