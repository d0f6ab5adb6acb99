"""An evaluation in inference mode goes through the rows of its outputs."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(dp=2)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
with torch.inference_mode():
    out = model(inputs())
    best = [int(row.argmax()) for row in out]
    halves = [part.mean().item() for part in out.chunk(2)]
    assert len(best) == 4 and out.detach()[0].shape == (8,) and len(halves) == 2
dist.destroy_process_group()
