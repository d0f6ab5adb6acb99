"""The data of one rank end earlier.

error: RuntimeError
says: rank 1 | ended|never
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(5 - rank()):
    model(inputs()).sum().backward()
