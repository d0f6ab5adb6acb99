"""Layers of one type are recorded once, if they do the same."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tests.ranks import RankPools
from tests.static.models import both, compare, tp_plan
from vescale import Plan
from vescale.static import _analysis, _record, report

pytestmark = pytest.mark.helper("dispatch")

_plan = functools.partial(tp_plan, mlp=r"layers\.\d+")


class Layer(nn.Module):
    def __init__(self, index: int, dim: int) -> None:
        super().__init__()
        self.index, self.dim = index, dim
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(torch.softmax(h, self.dim) * h)


class Stack(nn.Module):
    """Layers that normalize along these dims. Dim 1 is whole on each rank, and dim 2 is not."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(index, dim) for index, dim in enumerate(dims)])
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class UsesOne(Stack):
    """The result of one layer goes elsewhere, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: Any = None
        for layer in self.layers:
            x = layer(x)
            used = x if layer is self.layers[3] else used
        return x.sum() + self.head(used).square().sum()


class Twice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class UsesParameters(Stack):
    """Of one layer, beside the layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer: Any = self.layers[3]
        return super().forward(x).sum() + (layer.norm.weight * layer.up.weight).sum()


DIMS: dict[int, int] = {}


class LayerOfATable(Layer):
    """What it does depends on which layer it is, though it reads no attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(torch.softmax(h, DIMS.get(id(self), 1)) * h)


class OfATable(Stack):
    def __init__(self) -> None:
        super().__init__((1,) * 7)
        for layer in self.layers:
            layer.__class__ = LayerOfATable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DIMS[id(self.layers[4])] = 2
        return super().forward(x)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(build: Any, plan: Any = _plan) -> tuple[Any, int]:
    """The report of a model that ran as in eager mode, and how many torch functions were recorded in its first step."""
    models, found = both(build, plan), []
    with mock.patch.object(_record, "run_on_locals", side_effect=_record.run_on_locals) as recorded:
        for step in range(4):
            compare(models, batch(step))
            found.append(recorded.call_count)
    return report(models[1]), found[0]


def layers_that_do_the_same() -> None:
    """Functions are recorded, and what is changed in them decided, as often for nine layers as for six."""
    numbers = []
    for count in (6, 9):
        with mock.patch.object(_analysis, "untaken_branches", side_effect=_analysis.untaken_branches) as planned:
            found, number = run(functools.partial(Stack, (1,) * count))
        assert found.recordings == 1 and found.static_steps == 3 and not found.fallbacks, found
        assert {f"layers.{i}.down" for i in range(count)} <= set(found.static), found
        numbers.append((number, planned.call_count))
    assert numbers[0] == numbers[1], numbers


def attributes_that_are_read() -> None:
    found, number = run(functools.partial(Stack, (1, 1, 1, 2, 1, 2, 1)))
    assert found.recordings == 1 and found.static_steps == 3 and str(found).count("softmax:") == 2, found
    assert number > run(functools.partial(Stack, (1,) * 7))[1]


def a_layer_with_another_gradient() -> None:
    def plan(mesh: DeviceMesh) -> Plan:
        return _plan(mesh).shard("head.(weight|bias)", Shard(0))

    found, _ = run(functools.partial(UsesOne, (1,) * 7), plan)
    assert found.recordings == 2 and found.static_steps == 2, found


def a_layer_with_other_arguments() -> None:
    found, _ = run(OfATable)
    assert found.recordings == 2 and found.static_steps == 2 and str(found).count("softmax:") == 1, found


def parameters_that_are_used_outside() -> None:
    found, _ = run(functools.partial(UsesParameters, (1,) * 7))
    assert found.recordings == 2 and found.static_steps == 2, found


def layers_that_run_twice() -> None:
    found, _ = run(functools.partial(Twice, (1,) * 6))
    assert found.static_steps >= 2, found


CASES = (
    layers_that_do_the_same,
    attributes_that_are_read,
    a_layer_with_another_gradient,
    a_layer_with_other_arguments,
    parameters_that_are_used_outside,
    layers_that_run_twice,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_repeated_layers(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)
