"""Parameters are initialized, and noise is added to them, alike on every rank."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.manual_seed(1)
for module in model.modules():
    if isinstance(module, nn.Linear):
        module.reset_parameters()
generator = torch.Generator().manual_seed(7)
for step in range(5):
    F.dropout(model(inputs(step)), 0.5).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            parameter.normal_(generator=generator)
