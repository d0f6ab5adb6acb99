"""One rank initializes a parameter of which it holds a part.

error: InputMismatchError
says: normal_ | nothing on rank 1 | if rank == 0
"""

from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    nn.init.normal_(model.up.weight)
model(inputs()).sum().backward()
