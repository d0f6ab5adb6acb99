"""Each rank seeds the generator by its rank before it builds the model.

error: PlanMismatchError
says: up.weight | seed
"""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
torch.manual_seed(rank())
parallelize(Net(), plan(mesh))
