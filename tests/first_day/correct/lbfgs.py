"""L-BFGS calls the model several times a step."""

import torch
import torch.nn.functional as F

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs()), inputs(1))
    loss.backward()
    return loss


for _ in range(2):
    optimizer.step(closure)
