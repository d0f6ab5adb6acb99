"""FSDP2 is put around a model of which a part is parallelized.

error: ForeignToolError
says: fully_shard of a parallelized model | init: Ragged, run: R
"""

from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
fully_shard(nn.Sequential(parallelize(Net(), plan(mesh)), nn.Linear(8, 8)))
