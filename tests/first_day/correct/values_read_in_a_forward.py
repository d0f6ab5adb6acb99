"""All ranks read values that are cut, in a forward, a hook and a part of the model that is called by itself."""

import torch

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Reading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.relu(self.up(self.norm(x)))
        return self.down(hidden / max(hidden.mean().item(), 1e-3))


mesh = start(tp=2)
model = parallelize(Reading(), plan(mesh))
seen: list[float] = []
model.up.register_forward_hook(lambda module, args, output: seen.append(output.sum().item()))
for number in range(5):
    model(inputs(number)).sum().backward()
    with torch.no_grad():
        seen.append(model.up(inputs(number)).sum().item())
