"""Gradients that are one tensor to autograd, of two summands, are tensors of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.device import device_type
from tests.ranks import RankPools
from tests.simulate import simulate
from tests.static.models import mesh_of
from vescale import Plan, parallelize
from vescale.compat import no_torch_function
from vescale.ops import enter_local
from vescale.static import report


class Sum(nn.Module):
    """The gradients of ``a``, ``b`` and ``c`` are one tensor, that of ``d`` is a number with strides of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + (self.a + self.b) + self.c).square().sum() + self.d.sum()


def step_of_clipping(mode: str) -> None:
    """A norm is clipped in place, as ``clip_grad_norm_`` does: twice where two gradients share their memory."""
    torch.manual_seed(0)
    one = Sum()
    torch.manual_seed(0)
    many = parallelize(Sum(), Plan(mesh_of()), mode=mode)
    for step in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        for model in (one, many):
            model.zero_grad()
            model(x).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            if step % 2:
                model(x).backward()  # on top
        for (name, expected), found in zip(one.named_parameters(), many.parameters(), strict=True):
            assert isinstance(found.grad, DTensor) and expected.grad is not None
            assert torch.equal(found.grad.to_local(), expected.grad), (step, name)
    if mode == "static" and report(many).static_steps:
        assert report(many).static_steps == 5, report(many)


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
def test_gradients_of_summands(ranks: RankPools, mode: str) -> None:
    ranks.run(step_of_clipping, mode, world_size=2)


def shared_by_values() -> None:
    """``h`` enters twice, and autograd adds the second gradient to the first one in its memory, which ``w`` got, too."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    parallelize(nn.Identity(), Plan(mesh))  # which installs what there is
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(3, 3, generator=generator) for _ in range(4)]
    w, x = (torch.nn.Parameter(v.clone()) for v in values[:2])
    one = x * 2
    ((one + w) * values[2]).sum().backward(retain_graph=True)
    (one * values[3]).sum().backward()
    whole = [DTensor.from_local(v.clone(), mesh, [Replicate()]).requires_grad_() for v in values[:2]]
    with no_torch_function():
        h = whole[1] * 2
        w_local = enter_local(whole[0])
        first, second = enter_local(h), enter_local(h)
        loss = ((first + w_local) * values[2]).sum() + (second * values[3]).sum()
        loss.backward()
    for found, expected in zip(whole, (w, x), strict=True):
        assert found.grad is not None and torch.equal(found.grad.to_local(), expected.grad)
    for parameter in whole:
        parameter.grad = None
    with no_torch_function():
        (enter_local(whole[0]) + enter_local(whole[1])).sum().backward()
    assert whole[0].grad is not None and whole[1].grad is not None
    whole[0].grad.zero_()
    assert whole[1].grad.to_local().min() == 1


def test_gradients_of_values(ranks: RankPools) -> None:
    ranks.run(shared_by_values, world_size=2)


def test_gradients_of_values_without_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    simulate(shared_by_values, 2)
