"""Only rank 0 waits at a barrier.

error: StepMismatchError | hang
says: rank 1 is before forward 1 | ranks [0] have not arrived|ranks [0] did not arrive
"""

import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    dist.barrier()
model(inputs()).sum().backward()
