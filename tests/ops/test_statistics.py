"""Statistics that the model's own code computes with: one device's numbers, reduced where needed, in strict mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationError


def product_in_place(y: Any) -> Any:
    """What is written to is the caller's tensor, not a reduced copy of it."""
    mean = y.mean(0)
    mean.mul_(y.square().mean(0))
    return mean


# What is computed of y, whose rows are cut, and how many sums are reduced on the way (a pending result of one number is
# reduced as the model's output, on top of that).
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "sum() of losses begins with 0": (lambda y: sum([y.square().mean(), y.sin().sum(), 2 * y.mean()]), 0),
    "a total that begins with 0.0": (lambda y: 0.0 + y.mean(), 0),
    "a number counts once": (lambda y: y.mean() + 1, 1),
    "a number on the left": (lambda y: 3 - y.sum(0), 1),
    "torch.add with alpha": (lambda y: torch.add(y.mean(), y.sum(), alpha=2), 0),
    "a product of two": (lambda y: y.mean() * y.square().mean(), 2),
    "a product in place": (product_in_place, 1),
    "a product with a number": (lambda y: 0.01 * y.mean(), 0),
    "a quotient": (lambda y: y.sum() / y.square().sum(), 1),
    "a function": (lambda y: y.square().sum(0).sqrt(), 1),
    "means over dims": (lambda y: y.unsqueeze(-1).mean((0, 1), keepdim=True) + torch.mean(y, dim=0).mean(), 0),
    "balance of experts": (lambda y: (y.mean(0) * y.softmax(-1).mean(0)).sum() * y.shape[-1], 2),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.weight)


def same(mesh: Any, name: str, rows: int) -> None:
    function, num_reduced = FUNCTIONS[name]
    reference, model = Apply(function), Apply(function)
    parallelize(model, Plan(mesh).shard("<in:x>", {"dp": Shard(0)}), strict=True)
    x = 2 + torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with record_comms() as comms:
        found = model(x)
    assert comms.count() == comms.count("all_reduce")
    assert sum(event.requester.startswith("statistic") for event in comms.records) == num_reduced, comms
    assert isinstance(found, DTensor)
    expected = reference(x)
    torch.testing.assert_close(found.full_tensor(), expected)
    expected.sum().backward()
    found.sum().backward()
    assert reference.weight.grad is not None
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)  # type: ignore[attr-defined]


def statistics() -> int:
    mesh = make_mesh(dp=4)
    return run_cases(same, [(mesh, name, rows) for name in FUNCTIONS for rows in (8, 6, 3)])


def test_statistics(ranks: RankPools) -> None:
    assert set(ranks.run(statistics)) == {3 * len(FUNCTIONS)}


def activation() -> None:
    """A number added to a pending activation is the plan's business."""
    model = Apply(lambda y: y.T @ y + 1)
    parallelize(model, Plan(make_mesh(dp=4)).shard("<in:x>", {"dp": Shard(0)}), strict=True)
    with pytest.raises(ImplicitCommunicationError):
        model(torch.ones(4, 5, dtype=torch.float64))


def test_activations_are_no_statistics(ranks: RankPools) -> None:
    ranks.run(activation)
