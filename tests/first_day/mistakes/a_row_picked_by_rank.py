"""Each rank takes the row of its number out of the global output.

error: InputMismatchError
says: Select(dim=0, index=0 | index=1 | select the same rows
"""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, rank, start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in>", Shard(0), mesh="dp"))
model(inputs())[rank()].sum().backward()
