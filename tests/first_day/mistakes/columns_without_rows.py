"""Columns are cut, and the next weight is not; strict mode refuses.

error: ImplicitCommunicationError
says: norm.<out>
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, inputs, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("up.(weight|bias)", Shard(0), mesh="tp"), strict=True)
model(inputs()).sum().backward()
