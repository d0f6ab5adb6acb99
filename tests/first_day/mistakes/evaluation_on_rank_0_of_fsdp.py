"""Only rank 0 evaluates a model of `fully_shard`.

error: RuntimeError
says: rank 0 | rank 1 | forward
"""

from tests.first_day.start import Net, inputs, rank, start
from vescale.fsdp import fully_shard

mesh = start(dp=2)
model = fully_shard(Net(), mesh=mesh["dp"])
for step in range(4):
    model(inputs()).sum().backward()
    if step == 1 and rank() == 0:
        model(inputs())
