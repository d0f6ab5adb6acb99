"""One rank passes float64.

error: RuntimeError
says: float64 | float32 | rank 1
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
batch = inputs()
model(batch.double() if rank() else batch).sum().backward()
