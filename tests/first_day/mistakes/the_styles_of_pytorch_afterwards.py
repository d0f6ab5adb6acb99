"""A parallelized model is given to `parallelize_module`.

error: ForeignToolError
says: parallelize_module of a parallelized model | ColwiseParallel as plan.shard
"""

from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
model(inputs()).sum().backward()
