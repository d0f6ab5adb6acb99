"""Rank 0 writes what all ranks have gathered."""

import io

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model(inputs()).sum().backward()
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
if rank() == 0:
    torch.save(state, io.BytesIO())
    print(model, [parameter.shape for parameter in model.parameters()])
