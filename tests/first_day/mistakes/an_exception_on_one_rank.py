"""One rank raises in its data loading, and the others wait for it.

error: ValueError | RuntimeError
says: rank 1
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(3):
    if step == 1 and rank() == 1:
        raise ValueError("rank 1 cannot read its file")
    model(inputs()).sum().backward()
