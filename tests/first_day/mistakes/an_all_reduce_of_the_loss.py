"""A loss is reduced by the script, as with DDP.

error: RuntimeError
says: all_reduce|allreduce | already global | remove the collective
"""

import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
loss = parallelize(Net(), plan(mesh))(inputs()).square().mean()
loss.backward()
dist.all_reduce(loss)
