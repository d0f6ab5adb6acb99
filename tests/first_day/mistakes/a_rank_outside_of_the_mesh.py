"""The mesh leaves a rank out, which calls the model nevertheless.

error: NotParallelizedError
says: not part of the mesh | create a mesh of all ranks
"""

from torch.distributed.device_mesh import DeviceMesh

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

start(tp=2)
mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
model = parallelize(Net(), plan(mesh))
model(inputs()).sum().backward()
