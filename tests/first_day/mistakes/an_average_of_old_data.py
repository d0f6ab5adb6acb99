"""An average of ``p.data`` of parameters that were listed before `parallelize`.

error: ReplacedParameterError
says: reads after the model has been trained | 'norm.weight' of Net | model.parameters()
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
parameters = list(model.parameters())
averages = [p.data.clone() for p in parameters]
parallelize(model, plan(mesh))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(inputs(step)).square().mean().backward()
    optimizer.step()
    for average, parameter in zip(averages, parameters):
        average.mul_(0.9).add_(parameter.data, alpha=0.1)
