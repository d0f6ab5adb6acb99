"""A breakpoint whose condition is false, in a forward, a hook and a backward."""

import torch

import vescale
from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Watched(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vescale.breakpoint(when=False)
        return super().forward(x)


mesh = start(tp=2)
model = parallelize(Watched(), plan(mesh))
model.up.register_forward_hook(lambda *_: vescale.breakpoint(when=lambda: False))
model.down.weight.register_hook(lambda _: vescale.breakpoint(when=False))
for _ in range(4):
    model(inputs()).sum().backward()
