"""The mesh of an entry is a number.

error: PlanError|TypeError
says: axis=7.5 is not the name of an axis | axis='tp'
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
Plan(mesh).shard("up.weight", Shard(0), mesh=7.5)
