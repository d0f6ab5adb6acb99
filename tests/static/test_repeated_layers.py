"""Layers of one type are recorded once, if they do the same."""

from __future__ import annotations

import functools
import gc
import weakref
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


class LayerWithAnotherNumber(Layer):
    """Which changes no placement."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(torch.softmax(self.norm(x), DIMS.get(id(self), 1))))


class LayerWithAnotherValue(Layer):
    """Of the same type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [torch.tanh(x), torch.relu(x)]
        number = DIMS.get(id(self), 1)
        return x + self.down(self.up(values[number - 1] - values[2 - number]))


class OfATable(Stack):
    def __init__(self, kind: type[Layer] = LayerOfATable) -> None:
        super().__init__((1,) * 7)
        for layer in self.layers:
            layer.__class__ = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DIMS[id(self.layers[4])] = 2
        OTHERS[id(self.layers[4])] = self.layers[0]
        return super().forward(x)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class LayerThatCallsAnother(Layer):
    """Another function, which does the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = twice if id(self) in DIMS else double
        return x + self.down(scale(self.up(self.norm(x))))


class LayerThatBranches(Layer):
    """Between torch functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = [1]
        if id(self) in DIMS:
            dims.append(2)
        return x + self.down(torch.relu(self.up(self.norm(x))))


OTHERS: dict[int, Any] = {}


class LayerWithAParameterOfAnother(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner: Any = OTHERS.get(id(self), self)
        return x + self.down(torch.relu(self.up(x * owner.norm.weight)))


class Fails(Layer):
    """After the first torch functions, where the model catches it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if id(self) in DIMS:
            raise LookupError
        return y


MADE: list[weakref.ref[torch.Tensor]] = []


class LayerThatIsWatched(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        MADE.append(weakref.ref(h))
        return x + self.down(h)


class Catches(OfATable):
    def __init__(self) -> None:
        super().__init__(Fails)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        DIMS[id(self.layers[4])] = 2
        for layer in self.layers:
            try:
                x = layer(x)
            except LookupError:
                x = x * 2
        return x


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


def a_layer_with_another_number() -> None:
    found, _ = run(functools.partial(OfATable, LayerWithAnotherNumber))
    assert found.recordings == 2 and found.static_steps == 2 and not found.fallbacks, found


def a_layer_with_another_value() -> None:
    found, _ = run(functools.partial(OfATable, LayerWithAnotherValue))
    assert found.recordings == 2 and found.static_steps == 2 and not found.fallbacks, found


def a_layer_that_calls_another_function() -> None:
    found, _ = run(functools.partial(OfATable, LayerThatCallsAnother))
    assert found.recordings == 2 and found.static_steps == 2 and not found.fallbacks, found


def a_layer_that_branches_between_functions() -> None:
    """The first static step refuses the branch."""
    found, _ = run(functools.partial(OfATable, LayerThatBranches))
    assert found.recordings == 2 and found.static_steps == 1, found
    assert [one.steps for one in found.fallbacks if "was not recorded" in one.reason] == [1], found


def a_layer_with_a_parameter_of_another() -> None:
    found, _ = run(functools.partial(OfATable, LayerWithAParameterOfAnother))
    assert found.recordings == 2 and found.static_steps == 2, found


def a_layer_that_fails() -> None:
    found, _ = run(Catches)
    assert found.recordings == 2 and found.static_steps == 2, found


def tensors_that_are_not_kept() -> None:
    model = both(functools.partial(OfATable, LayerThatIsWatched), _plan)[1]
    with torch.no_grad():
        model(batch(0))
    gc.collect()
    assert len(MADE) == 7 and not any(x() is not None for x in MADE), MADE


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
    a_layer_with_another_number,
    a_layer_with_another_value,
    a_layer_that_calls_another_function,
    a_layer_that_branches_between_functions,
    a_layer_with_a_parameter_of_another,
    a_layer_that_fails,
    tensors_that_are_not_kept,
    parameters_that_are_used_outside,
    layers_that_run_twice,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_repeated_layers(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)
