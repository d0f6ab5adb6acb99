"""A state dict of a larger model is loaded.

error: RuntimeError
says: up.weight | (32, 8)|[32, 8]
"""

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model.load_state_dict(Net(32).state_dict())
