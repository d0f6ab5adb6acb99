"""An entry gives two placements to one axis.

error: PlanError|TypeError|ValueError
says: [Shard(dim=0), Shard(dim=1)] | tp
"""

from torch.distributed.tensor import Replicate, Shard  # noqa: F401

from tests.first_day.start import Net, start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = Net()
parallelize(model, Plan(mesh).shard("up.weight", [Shard(0), Shard(1)], mesh="tp"))
