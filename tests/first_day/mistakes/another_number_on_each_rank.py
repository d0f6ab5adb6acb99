"""A Python number that the forward uses differs between ranks.

error: RuntimeError
says: rank 1 | scale | 1.0
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(4):
    model(inputs(), scale=float(rank())).sum().backward()
