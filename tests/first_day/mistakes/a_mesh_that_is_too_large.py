"""The mesh has more ranks than the job.

error: RuntimeError
says: 4 | 2
"""

from torch.distributed.device_mesh import init_device_mesh

from tests.first_day.start import start

start(tp=2)
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
