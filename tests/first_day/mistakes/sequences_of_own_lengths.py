"""Each rank pads its rows to its own longest sequence.

error: InputMismatchError
says: (2, 5) | No axis shards dim 1 | padding to the longest sequence
"""

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
parallelize(model, Plan(mesh).shard("<in:input>", Shard(0), mesh="dp", given="local"))
model(torch.ones(2, 5 + rank(), dtype=torch.long)).sum().backward()
