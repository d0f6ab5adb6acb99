"""GradScaler and clipping."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(4):
    optimizer.zero_grad()
    scaler.scale(F.mse_loss(model(inputs()), inputs(1))).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
