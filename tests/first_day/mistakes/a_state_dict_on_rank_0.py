"""Only rank 0 asks for the full state dict.

error: RuntimeError
says: rank 1 | full_state_dict | rank 0
open: a gather of a state dict is not watched
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
model(inputs()).sum().backward()
