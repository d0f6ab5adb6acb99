"""A plain tensor that meets the output differs between ranks.

error: InputMismatchError
says: other of mul | on rank 0 | every rank
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
loss = (parallelize(Net(), plan(mesh))(inputs()) * torch.full((4, 8), 1.0 + rank())).sum()
loss.backward()
