"""With given="local", the local batches have different sizes."""

import torch
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
one_device = Net()
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp", given="local"))
model.load_state_dict(one_device.state_dict())
for rows in (3, 4, 3, 4, 3, 3, 4, 3):
    batch = inputs()[:rows]
    model(batch.chunk(2)[rank()]).sum().backward()
    one_device(batch).sum().backward()
    for found, wanted in zip(model.parameters(), one_device.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
