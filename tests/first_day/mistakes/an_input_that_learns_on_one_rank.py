"""The input requires a gradient on one rank.

error: InputMismatchError
says: requires a gradient on rank 0
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model(inputs().requires_grad_(rank() == 0)).sum().backward()
