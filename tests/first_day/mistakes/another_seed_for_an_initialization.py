"""Each rank has a seed of its own, and the model is initialized after it was cut.

error: InputMismatchError
says: seed 0 | seed 1 | torch.manual_seed with the same seed | reset_parameters
"""

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))


def reset_parameters(model: nn.Module) -> None:
    torch.manual_seed(rank())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


reset_parameters(model)
model(inputs()).sum().backward()
