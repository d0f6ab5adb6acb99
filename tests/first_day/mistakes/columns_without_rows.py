"""Columns are cut, and the next weight is not; strict mode refuses.

error: ImplicitCommunicationError
says: norm.<out>
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import inputs, Net, plan, start
from vescale import parallelize, Plan  # noqa: F401

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("up.(weight|bias)", Shard(0), mesh="tp"), strict=True)
model(inputs()).sum().backward()
