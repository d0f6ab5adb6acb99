"""One rank calls a module of the model by itself.

error: StepMismatchError
says: a call of 'up' | rank 1 is before forward 1
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    print(model.up(inputs()).shape)
model(inputs()).sum().backward()
