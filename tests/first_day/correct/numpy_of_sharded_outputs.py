"""All ranks make arrays and lists of a sharded output: the whole value."""

import numpy as np
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh).shard("<out>", Shard(1), mesh="tp"))
out = model(inputs()).detach()
assert out.numpy().shape == np.asarray(out.tolist()).shape == (4, 8)
