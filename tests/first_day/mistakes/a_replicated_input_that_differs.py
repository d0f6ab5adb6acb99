"""An input of each rank is declared as replicated.

error: InputMismatchError
says: input 'x' | rank 1
"""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.first_day.start import Net, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
model(DTensor.from_local(torch.full((4, 8), float(rank())), mesh, [Replicate()])).sum().backward()
