"""One rank freezes a parameter.

error: InputMismatchError
says: requires_grad | False of up.weight | on every rank
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    model.up.weight.requires_grad_(False)
model(inputs()).sum().backward()
