"""The mesh has no such axis.

error: PlanError
says: model | tp
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("up.weight", Shard(0), mesh="model"))
