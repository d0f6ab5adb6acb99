"""Only rank 0 evaluates.

error: RuntimeError
says: rank 0 | rank 1 | forward
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(4):
    model(inputs()).sum().backward()
    if step == 1 and rank() == 0:
        model(inputs())
