"""Only rank 0 asks for the full state dict.

error: RuntimeError
says: rank 1 | a_state_dict_on_rank_0.py | rank 0 | forward 1
"""

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
if rank() == 0:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
model(inputs()).sum().backward()
