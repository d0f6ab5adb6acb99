"""One rank is slower than the others."""

import time

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(3):
    time.sleep(rank() * 1.0)
    model(inputs(step)).sum().backward()
