"""Functions with a derivative of zero: autograd makes it by the sizes of a DTensor, as a plain tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.simulate import simulate
from vescale import Plan, parallelize

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: lambda h, name=name: getattr(h, name)(*([0.5] if name[0] in "elgn" else []))  # type: ignore[misc]
    for name in ("eq_", "ne_", "lt_", "gt_", "le_", "ge_", "sgn", "sgn_", "sign_", "floor_", "round")
}
FUNCTIONS["eq_ of tensors"] = lambda h: h.eq_(h.detach().round())
FUNCTIONS["torch.sgn"] = lambda h: torch.sgn(input=h)


class Net(nn.Module):
    """Zeros flow back to linear layers, views, parameters, and beside other gradients."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.side, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.ones(6))
        self.function = function
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) * self.gain
        cut = self.up(h).view(2, 2, 6).transpose(0, 1).clone()
        other = self.side(h)
        return h.sin() + self.function(cut).reshape(4, 6) + self.function(other * 2) + self.function(self.gain * 3)


def equal(drawn: Net) -> None:
    model, one = copy.deepcopy(drawn), copy.deepcopy(drawn)
    plan = Plan(init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",)))
    parallelize(model, plan.shard("up.weight", Shard(0)).shard("up.bias", Shard(0)).shard("side.weight", Shard(1)))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs: list[Any] = [model(inputs[0]), one(inputs[1])]
    for y in outputs:
        y.square().sum().backward()
    torch.testing.assert_close(outputs[0].full_tensor(), outputs[1], rtol=1e-12, atol=1e-12)
    for (path, own), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        assert isinstance(own.grad, DTensor) and expected.grad is not None
        torch.testing.assert_close(own.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12, msg=path)
    assert inputs[0].grad is not None
    torch.testing.assert_close(_whole(inputs[0].grad), inputs[1].grad, rtol=1e-12, atol=1e-12)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_to_one_device(name: str) -> None:
    torch.manual_seed(0)  # ranks are threads: the model is drawn before
    simulate(equal, 2, Net(FUNCTIONS[name]))
