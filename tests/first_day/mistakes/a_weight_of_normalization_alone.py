"""The weight of a norm is cut, but not its input; strict mode refuses.

error: PlanError | ImplicitCommunicationError
says: norm
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, inputs, plan, start
from vescale import Plan, parallelize  # noqa: F401

mesh = start(tp=2)
model = Net()
parallelize(model, plan(mesh).shard("norm.weight", Shard(0), mesh="tp"), strict=True)
model(inputs()).sum().backward()
