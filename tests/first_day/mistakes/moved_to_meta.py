"""The model is moved to the meta device.

error: RuntimeError|NotImplementedError
says: meta
"""

import torch

from tests.first_day.start import inputs, Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model.to("meta")
model(inputs()).sum().backward()
