"""Only rank 0 computes the norm of gradients for its log.

error: StepMismatchError
says: rank 0 is before a read | rank 1 is before forward 2 | if rank == 0
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model(inputs()).sum().backward()
if rank() == 0:
    print(sum((parameter.grad**2).sum() for parameter in model.parameters()) ** 0.5)
model(inputs()).sum().backward()
