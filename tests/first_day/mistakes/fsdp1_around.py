"""FullyShardedDataParallel is put around a parallelized model.

error: DTensorStorageError
says: remove FullyShardedDataParallel
"""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
FullyShardedDataParallel(parallelize(Net(), plan(mesh)), device_id=torch.device("cpu"))
