"""A scale that learns is left outside of the model.

error: RuntimeError
says: requires a gradient | Make it a parameter of the model
"""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
scale = torch.nn.Parameter(torch.ones(8))
(parallelize(Net(), plan(mesh))(inputs()) * scale).sum().backward()
