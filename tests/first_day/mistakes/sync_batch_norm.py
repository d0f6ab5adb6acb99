"""Batch norm is converted to nn.SyncBatchNorm.

error: ForeignToolError
says: remove convert_sync_batchnorm | global batch
"""

from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import start
from vescale import Plan, parallelize

mesh = start(dp=2)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
parallelize(model, Plan(mesh).shard("<in>", Shard(0)))
