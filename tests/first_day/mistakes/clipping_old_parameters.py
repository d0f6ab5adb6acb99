"""Parameters are listed before `parallelize`, and clipped after backward.

error: RuntimeError
says: weight | parallelize | before
"""

from torch.nn.utils import clip_grad_norm_

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = Net()
parameters = list(model.parameters())
parallelize(model, plan(mesh))
model(inputs()).sum().backward()
clip_grad_norm_(parameters, 1.0)
