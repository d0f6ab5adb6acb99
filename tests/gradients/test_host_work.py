"""What the reducer of a parallelized model does on the host in each backward: one hook per parameter, no DTensor op."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.ranks import RankPools
from vescale import Plan, gradients, parallelize
from vescale.gradients import _hooked_parameters
from vescale.runtime import gradient_reducer, no_sync

ENGINE = str(Path(gradients.__file__).parent) + os.sep


class OpsOfTheEngine(TorchDispatchMode):
    """Records the ops on DTensors that code of the gradient engine calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe()
        while frame is not None and any(issubclass(kind, DTensor) for kind in types):
            if frame.f_code.co_filename.startswith(ENGINE) or "is_captured" in frame.f_code.co_name:
                self.found.append(str(func))
                break
            frame = frame.f_back  # type: ignore[assignment]
        return func(*args, **(kwargs or {}))


def build() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The same layers on one device and parallelized, and a batch."""
    torch.manual_seed(0)
    model, reference = (
        nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(3)]) for _ in range(2)
    )
    model.load_state_dict(reference.state_dict())
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    plan = Plan(mesh)
    plan.shard("<in>", Shard(0))
    parallelize(model, plan)
    return model, reference, torch.randn(6, 4)


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert isinstance(found, DTensor) and expected is not None
    assert all(p.is_replicate() for p in found.placements)
    torch.testing.assert_close(found.full_tensor(), expected)


def one_hook_and_no_op() -> None:
    model, reference, x = build()
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().sum()
        with OpsOfTheEngine() as ops:
            loss.backward()
        assert ops.found == []
        for parameter in model.parameters():
            assert len(parameter._backward_hooks) == 1
            assert len(parameter._post_accumulate_grad_hooks) == 1
    reference(x).square().sum().backward()
    for own, other in zip(model.parameters(), reference.parameters()):
        same(own.grad, other.grad)


def the_gate_skips_hooks() -> None:
    entered = []
    original = _hooked_parameters.HookedParameters._complete_or_begin

    def count(self: Any, *args: Any) -> Any:
        entered.append(1)
        return original(self, *args)

    _hooked_parameters.HookedParameters._complete_or_begin = count  # type: ignore[method-assign]
    try:
        model, _, x = build()
        for _ in range(3):
            entered.clear()
            model(x).square().sum().backward()
            assert len(entered) == 1, "only the first gradient of a backward enters Python before it is accumulated"
        with no_sync(model):
            entered.clear()
            model(x).square().sum().backward()
            assert len(entered) == 1
    finally:
        _hooked_parameters.HookedParameters._complete_or_begin = original  # type: ignore[method-assign]


def captured_gradients() -> None:
    """``torch.autograd.grad`` returns complete gradients: alone, and inside of a backward, while the gate is shut."""
    model, reference, x = build()
    own, other = list(model.parameters()), list(reference.parameters())
    expected = torch.autograd.grad(reference(x).square().sum(), other)
    for found, wanted in zip(torch.autograd.grad(model(x).square().sum(), own), expected):
        same(found, wanted)
    assert all(parameter.grad is None for parameter in own)
    inner = model(x).square().sum()
    seen: list[Any] = []
    out = model(x)
    last = own[-1]
    handle = last.register_post_accumulate_grad_hook(lambda _: seen.append(torch.autograd.grad(inner, own)))
    out.square().sum().backward()
    handle.remove()
    assert len(seen) == 1
    for parameter, found, wanted in zip(own, seen[0], expected):
        same(found, wanted)
        same(parameter.grad, wanted)


def chosen_inputs() -> None:
    """``backward(inputs=...)`` accumulates; its gradients are reduced as any others."""
    model, reference, x = build()
    for one in (model, reference):
        weight = one[1][0].weight
        one(x).square().sum().backward(inputs=[weight])
    same(model[1][0].weight.grad, reference[1][0].weight.grad)
    assert model[0][0].weight.grad is None
    assert gradient_reducer(model).num_buckets >= 1


@pytest.mark.parametrize("case", [one_hook_and_no_op, captured_gradients, chosen_inputs])
def test_host_work(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=2)


@pytest.mark.helper("hook_gate")
def test_the_gate_skips_hooks(ranks: RankPools) -> None:
    ranks.run(the_gate_skips_hooks, world_size=2)
