"""The phase does not exist.

error: PlanError|ValueError|TypeError
says: phase
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
Plan(mesh).shard("up.weight", Shard(0), mesh="tp", phase="training")
