"""Only one of two tied weights has an entry, and the other one another.

error: PlanError
says: tied
"""

from torch import nn
from torch.distributed.tensor import Shard

from tests.first_day.start import start
from vescale import Plan, parallelize

mesh = start(tp=2)
model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
model["head"].weight = model["embed"].weight
parallelize(model, Plan(mesh).shard("embed.weight", Shard(0), mesh="tp").shard("head.weight", Shard(1), mesh="tp"))
