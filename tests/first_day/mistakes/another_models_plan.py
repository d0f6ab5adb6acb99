"""A plan of the zoo is for another model.

error: PlanError
says: matches
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize, plan_zoo  # noqa: F401

mesh = start(dp=1, tp=2)
model = Net()
parallelize(model, plan_zoo.load("llama", mesh))
