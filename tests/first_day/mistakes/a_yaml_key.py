"""A key of the YAML file has a typing error.

error: PlanError
says: shrad
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
Plan.from_yaml("shrad:\n  up.weight: {tp: S(0)}\n", mesh)
