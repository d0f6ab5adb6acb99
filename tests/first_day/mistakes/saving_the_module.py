"""The module is pickled instead of its state dict.

error: RuntimeError|TypeError
says: state_dict
"""

import io

import torch

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
torch.save(model, io.BytesIO())
