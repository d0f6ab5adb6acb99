"""Parameters are listed before `fully_shard`, and clipped by vescale's function.

error: RuntimeError
says: weight | fully_shard | before
"""

from tests.first_day.start import Net, inputs, start
from vescale.fsdp import fully_shard
from vescale.optim import clip_grad_norm_

mesh = start(dp=2)
model = Net()
parameters = list(model.parameters())
fully_shard(model, mesh=mesh["dp"])
model(inputs()).sum().backward()
clip_grad_norm_(parameters, 1.0)
