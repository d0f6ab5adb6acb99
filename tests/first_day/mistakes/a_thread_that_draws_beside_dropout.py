"""A thread of one rank draws from the default generator while forwards run, from which dropout draws as well.

error: InputMismatchError
says: seed and state of the default generator | from a separate torch.Generator
"""

import threading

import torch
from torch import nn

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


mesh = start(tp=2)
model = parallelize(Dropped(), plan(mesh))
is_over = threading.Event()


def draw() -> None:
    while not is_over.wait(1e-4):
        torch.rand(1)


if rank() == 0:
    threading.Thread(target=draw, daemon=True).start()
try:
    for _ in range(6):
        model(inputs()).sum().backward()
finally:
    is_over.set()
