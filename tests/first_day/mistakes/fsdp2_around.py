"""Stock FSDP2 is put on a parallelized model.

error: PlanError
says: fully_shard | plan
"""

from torch.distributed.fsdp import fully_shard as stock_fully_shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
stock_fully_shard(model, mesh=mesh)
model(inputs()).sum().backward()
