"""Outputs of unequal lengths are padded for a loss."""

import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn.utils.rnn import pad_sequence

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
for step in range(2):
    out = model(inputs(step))
    pad_sequence([out[:1], out[1:], out[:3]], batch_first=True).square().mean().backward()
    model.zero_grad()
dist.destroy_process_group()
