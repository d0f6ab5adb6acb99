"""Ranks bring different plans.

error: PlanMismatchError
says: up.weight | rank 1
"""

from torch.distributed.tensor import Shard

from tests.first_day.start import Net, rank, start
from vescale import Plan, parallelize

mesh = start(tp=2)
parallelize(Net(), Plan(mesh).shard("up.weight", Shard(rank()), mesh="tp"))
