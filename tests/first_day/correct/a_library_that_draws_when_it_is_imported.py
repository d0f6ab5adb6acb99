"""A forward imports a library that draws from Python's random, which nobody has seeded."""

import importlib
import random
import sys

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Late(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in [name for name in sys.modules if name.startswith("rich")]:
            del sys.modules[name]
        state = random.getstate()
        importlib.import_module("rich.style")
        assert random.getstate() != state
        return super().forward(x)


mesh = start(tp=2)
model = parallelize(Late(), plan(mesh))
for _ in range(4):
    model(inputs()).sum().backward()
