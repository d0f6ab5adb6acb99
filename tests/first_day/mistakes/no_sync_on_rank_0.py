"""One rank accumulates while the others reduce.

error: StepMismatchError
says: the backward of forward 1 | forward 2|rank 0 is in a collective after forward 1
"""

import contextlib

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import no_sync, parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for _ in range(2):
    with no_sync(model) if rank() == 0 else contextlib.nullcontext():
        model(inputs()).sum().backward()
