"""A path has a typing error.

error: PlanError
says: dwon.weight | down.weight
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("dwon.weight", Shard(0), mesh="tp"))
