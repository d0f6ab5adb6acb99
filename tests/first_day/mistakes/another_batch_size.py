"""The last batch of one rank is smaller.

error: RuntimeError
says: rank 1 | [3, 8] | [4, 8]
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(3):
    model(inputs()[: 4 - rank()]).sum().backward()
