"""One rank skips a step, as scripts do with a loss that is not finite.

error: RuntimeError
says: rank 1 | forward
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(5):
    loss = model(inputs()).sum()
    if step == 2 and rank() == 1:
        continue
    loss.backward()
