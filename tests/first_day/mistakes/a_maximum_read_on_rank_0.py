"""Only rank 0 looks whether outputs are too large.

error: StepMismatchError
says: rank 0 is before a read of | rank 1 is before the backward
"""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
output = model(inputs())
if rank() == 0 and output.max() > 1e9:
    print("large")
output.sum().backward()
