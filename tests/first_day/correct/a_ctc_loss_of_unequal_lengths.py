"""A ctc loss of outputs of unequal lengths: its op leaves a part of what it keeps undefined."""

import torch
import torch.nn.functional as F

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
targets, lengths = torch.tensor([[1, 2, 3], [1, 2, 0]]), torch.tensor([3, 2])
for step in range(4):
    garbage = [torch.full((size,), float(rank())) for size in range(1, 400)]
    del garbage
    y = model(torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(step)))
    scores = (y.full_tensor() if step % 2 else y).log_softmax(-1)
    F.ctc_loss(scores, targets, torch.tensor([12, 7]), lengths, zero_infinity=step > 1).backward()
