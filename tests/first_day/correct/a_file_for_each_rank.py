"""Each rank saves its parts in a file of its own, and loads it."""

import os
import warnings

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

warnings.simplefilter("ignore")  # of torch.save, which writes parts
mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
path, before = os.environ["VESCALE_REPORTS"] + f"/{rank()}.pt", model.up.weight.full_tensor()
torch.save(model.state_dict(), path)
torch.nn.init.zeros_(model.up.weight)
model.load_state_dict(torch.load(path, weights_only=False))
assert torch.equal(before, model.up.weight.full_tensor())
