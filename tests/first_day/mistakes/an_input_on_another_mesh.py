"""An input is a DTensor on another mesh than the model's.

error: BoundaryError
says: the input 'x' is a DTensor on | ops need tensors on the same mesh | shard_batch(batch, model)
"""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model(DTensor.from_local(inputs(), other, [Shard(0)])).sum().backward()
