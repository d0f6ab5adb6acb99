"""The output of one model is the input of another one on another mesh.

error: BoundaryError
says: on the model's mesh|tensors on the same mesh
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import Plan, parallelize

mesh = start(tp=2)
other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
first, second = parallelize(Net(), plan(mesh)), parallelize(Net(), Plan(other).shard("<in>", Shard(0)))
second(first(inputs()))
