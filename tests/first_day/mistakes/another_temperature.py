"""Logits are divided by a temperature that differs between ranks.

error: InputMismatchError
says: different losses | Div(other=1.0) on rank 0 and Div(other=2.0) on rank 1
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
F.cross_entropy(model(inputs()) / (1.0 + rank()), torch.tensor([1, 2, 3, 4])).backward()
