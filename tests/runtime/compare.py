"""One training step of any model on a mesh against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.device import device_type
from tests.whole import whole, whole_tensors
from vescale import parallelize
from vescale.plans import Plan
from vescale.runtime import implicit_communication

Loss = Callable[[Any], torch.Tensor]


def pair(
    build: Callable[[], torch.nn.Module],
    entries: Callable[[Plan], None],
    mesh_sizes: Mapping[str, int],
    *,
    strict: bool = True,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(the model on one device, the same on a mesh)."""
    torch.manual_seed(0)
    reference = build().double()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh(device_type(), tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes))
    plan = Plan(mesh)
    entries(plan)
    parallelize(model, plan, strict=strict)
    return reference, model


def assert_same_gradients(reference: torch.nn.Module, model: torch.nn.Module, tolerance: float = 1e-12) -> None:
    gradients: Any = whole_tensors({name: own.grad for name, own in model.named_parameters()})
    for (name, own), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if expected.grad is None:
            assert own.grad is None, name
            continue
        assert own.grad is not None, name
        assert own.grad.placements == own.placements, (name, own.grad.placements)
        scale = max(expected.grad.abs().max().item(), 1e-6)
        difference = (gradients[name] - expected.grad).abs().max().item() / scale
        assert difference <= tolerance, (name, difference)


def assert_same_step(
    reference: torch.nn.Module,
    model: torch.nn.Module,
    *args: Any,
    loss: Loss | None = None,
    tolerance: float = 1e-12,
    max_implicit: int = 0,
    **kwargs: Any,
) -> None:
    """Forward and backward on both: the same outputs, the same gradients."""
    loss = loss or (lambda y: (y * y.sin() + y).mean())  # another gradient for every element
    expected, found = reference(*args, **kwargs), model(*args, **kwargs)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, DTensor)
        torch.testing.assert_close(whole(found), expected, rtol=1e-10, atol=1e-12)
    a, b = loss(expected), loss(found)
    torch.testing.assert_close(whole(b.detach()), a.detach(), rtol=1e-10, atol=1e-12)
    a.backward()
    b.backward()
    assert_same_gradients(reference, model, tolerance)
    assert len(implicit_communication(model)) <= max_implicit, implicit_communication(model)
