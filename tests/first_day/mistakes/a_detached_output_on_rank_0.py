"""Rank 0 detaches the output.

error: StepMismatchError
says: rank 0 is before forward 2 | rank 1 is before the backward of forward 1
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(2):
    output = model(inputs())
    if rank() == 0:
        output = output.detach().requires_grad_()
    output.sum().backward()
