"""An entry is for an input that forward does not have.

error: PlanError
says: pixels | x
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, inputs, plan, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
parallelize(model, plan(mesh).shard("<in:pixels>", Shard(0), mesh="tp"))
model(inputs())
