"""`parallelize` is called twice.

error: RuntimeError|PlanError
says: already|twice
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, plan, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
parallelize(model, plan(mesh))
parallelize(model, plan(mesh))
