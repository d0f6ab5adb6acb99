"""A model that `parallelize_module` has cut is given to `parallelize`.

error: ForeignToolError
says: 'up' is already distributed by parallelize_module | original model to parallelize, and use the plan instead
"""

from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
