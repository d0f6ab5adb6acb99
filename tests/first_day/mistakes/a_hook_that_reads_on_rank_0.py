"""A hook on one rank prints a value that is cut.

error: StepMismatchError
says: rank 0 is before a read of item() | (hook)) | if rank == 0
"""

import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))


def hook(module: object, args: object, output: torch.Tensor) -> None:
    if rank() == 0:
        print(output.mean().item())


model.up.register_forward_hook(hook)
model(inputs()).sum().backward()
