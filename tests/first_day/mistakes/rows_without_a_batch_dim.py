"""One rank gives a row without the dim of the batch.

error: InputMismatchError
says: have shapes | (8,) | ShardedBatchSampler
"""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
model(inputs() if rank() else inputs()[0]).sum().backward()
