"""The weight of a norm is cut, but not its input; strict mode refuses.

error: PlanError | ImplicitCommunicationError
says: norm
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import inputs, Net, plan, start
from vescale import parallelize, Plan  # noqa: F401

mesh = start(tp=2)
model = Net()
parallelize(model, plan(mesh).shard("norm.weight", Shard(0), mesh="tp"), strict=True)
model(inputs()).sum().backward()
