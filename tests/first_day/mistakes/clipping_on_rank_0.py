"""Only rank 0 clips gradients.

error: StepMismatchError | hang
says: rank 0 | rank 1
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize
from vescale.optim import clip_grad_norm_

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(3):
    model(inputs()).sum().backward()
    if rank() == 0:
        clip_grad_norm_(model.parameters(), 1.0)
