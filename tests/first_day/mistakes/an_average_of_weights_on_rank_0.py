"""Only rank 0 updates an average of the model, which all evaluate.

error: InputMismatchError
says: parameter 'norm.weight' | on every rank
"""

import torch
from torch.optim.swa_utils import AveragedModel

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
average = AveragedModel(model)
average.update_parameters(model)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(2)
if rank() == 0:
    average.update_parameters(model)
average(inputs())
average(inputs())
