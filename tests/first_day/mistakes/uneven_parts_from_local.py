"""DTensor.from_local is given parts of different sizes, without the global shape.

error: InputMismatchError
says: of shape (4, 8) | of shape (6, 8)
"""

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.first_day.start import Net, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
model(DTensor.from_local(torch.ones(2 + rank(), 8), mesh, [Shard(0)])).sum().backward()
