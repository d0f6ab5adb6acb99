"""A weight is made orthogonal after `parallelize`.

error: ForeignToolError
says: before parallelize | orthogonal
"""

from torch.nn.utils.parametrizations import orthogonal

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
orthogonal(model.up)
