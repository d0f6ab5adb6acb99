"""Noise for parameters is drawn from generators with different seeds.

error: InputMismatchError
says: trunc_normal_ | every generator= in the same way
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
nn.init.trunc_normal_(model.up.weight, generator=torch.Generator().manual_seed(rank()))
model(inputs()).sum().backward()
