"""Each rank reads the whole batch, and the plan takes it as a part; warnings are errors here.

error: RepeatedPartsWarning
says: given="local" | reads the global batch | ShardedBatchSampler
"""

import warnings

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, start
from vescale import Plan, parallelize
from vescale.errors import RepeatedPartsWarning

warnings.simplefilter("error", RepeatedPartsWarning)
mesh = start(dp=2)
model = parallelize(Net(), Plan(mesh).shard("<in:x>", Shard(0), given="local"))
for number in range(4):
    model(inputs(number)).sum().backward()
