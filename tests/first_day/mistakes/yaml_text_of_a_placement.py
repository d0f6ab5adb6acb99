"""A placement is misspelled.

error: PlanError
says: Sharded(0)
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
Plan.from_yaml("shard:\n  up.weight: {tp: Sharded(0)}\n", mesh)
