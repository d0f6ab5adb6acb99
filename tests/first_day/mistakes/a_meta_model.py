"""The model is on the meta device, without values.

error: RuntimeError|ValueError|PlanError
says: meta | deferred_init | load_hf
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
with torch.device("meta"):
    model = Net()
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
