"""With given="local", the local batches have different sizes."""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
for _ in range(3):
    model(inputs()[: 4 - rank()]).sum().backward()
