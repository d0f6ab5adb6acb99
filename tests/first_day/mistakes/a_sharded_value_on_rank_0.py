"""Only rank 0 reads an element of sharded logits.

error: RuntimeError
says: rank 0 | Shard
"""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh).shard("<out>", Shard(1), mesh="tp"))
logits = model(inputs())
if rank() == 0:
    print(logits[0, 0].item())
