"""The weight has no such dim.

error: PlanError
says: up.weight | Shard(2)|S(2) | (16, 8)
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("up.weight", Shard(2), mesh="tp"))
