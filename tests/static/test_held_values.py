"""Static mode: values that a forward reads without being given them, and tensors that it leaves behind."""

from __future__ import annotations

import gc
import os
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.device import device_type
from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, same
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

SETTINGS = {"dim": 1}
ALIASES = [1, 1]
KEPT: list[Any] = []


def batch(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, 4, 8)


def over_rows(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1)


def over_columns(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


class Reads(nn.Module):
    """``up`` is cut by columns, so that what is done along them is not that of the local part."""

    size = 1

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.function: Any = over_rows
        self.config = types.SimpleNamespace(dim=1, inner={"dims": [1, 0]})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp.up(x)
        return self.mlp.down(self.between(h) * h)  # the gradient of h is cut as h is

    def between(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class CallsFunction(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.function(h)


class ReadsConfiguration(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(self.config.dim)


class ReadsNestedList(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(self.config.inner["dims"][0])


class ReadsGlobal(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(SETTINGS["dim"])


class ReadsGlobalList(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(ALIASES[0])


class ReadsClass(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(self.size)


def _set_class(model: nn.Module, dim: int) -> None:
    type(model).size = dim


READERS: dict[type[Reads], Any] = {
    CallsFunction: lambda model, dim: setattr(model, "function", over_rows if dim == 1 else over_columns),
    ReadsConfiguration: lambda model, dim: setattr(model.config, "dim", dim),
    ReadsNestedList: lambda model, dim: model.config.inner["dims"].__setitem__(0, dim),
    ReadsGlobal: lambda model, dim: SETTINGS.__setitem__("dim", dim),
    ReadsGlobalList: lambda model, dim: ALIASES.__setitem__(0, dim),
    ReadsClass: _set_class,
}


def values_that_change() -> Any:
    """Recorded with one value and run with another, and back: what was recorded first is used again."""
    for kind, change in READERS.items():
        models = both(kind)
        for dim in (1, -1, 1, -1):
            for model in models:
                change(model, dim)
            for step in range(3):
                compare(models, batch(step))
        for model in models:
            change(model, 1)
        found = report(models[1])
        assert found.recordings == 2 and found.static_steps == 10, (kind, found)
    return None


class Scaled(Reads):
    @property
    def scale(self) -> Any:
        return self.mlp.up.weight.sum() if _is_whole() else 2.0

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale


class Constructed(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * _Scale(self.mlp.up.weight).number


class _Scale:
    def __init__(self, weight: torch.Tensor) -> None:
        self.number: Any = 2.0
        if _is_whole():
            self.number = weight.sum()


def _is_whole() -> bool:
    return "VESCALE_TEST_IS_WHOLE" in os.environ  # which no guard compares


class CalledBack(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * max(map(self.number_of, (1, 2)))

    def number_of(self, number: int) -> Any:
        return self.mlp.up.weight.sum() if _is_whole() else number


def unreached_branches() -> Any:
    """Of functions that Python or C++ calls: a property, a constructor, a callback. Nothing but the branch is different.
    Also where Python's list of all objects lacks the functions."""
    gc.freeze()
    for kind in (Scaled, Constructed, CalledBack):
        models = both(kind)
        for step in range(3):
            compare(models, batch(step))
        assert report(models[1]).static_steps > 0, (kind, report(models[1]))
        os.environ["VESCALE_TEST_IS_WHOLE"] = "1"
        for step in range(2):
            compare(models, batch(step))
        del os.environ["VESCALE_TEST_IS_WHOLE"]
        for step in range(2):
            compare(models, batch(step))
        assert "was not recorded" in str(report(models[1])), report(models[1])
    return None


class Keeps(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        KEPT.append(h)
        return h


def global_containers() -> Any:
    models = both(Keeps)
    for step in range(3):
        KEPT.clear()
        compare(models, batch(step))
        eager, static = KEPT
        assert type(static) is DTensor and same(eager, static)
    KEPT.clear()
    assert "keeps tensors" in str(report(models[1])), report(models[1])
    return None


class Passes(Reads):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h


def other_meshes() -> Any:
    """A model that is given DTensors of another mesh: an equal one is as good, ranks in another order are not."""
    models = both(Passes)
    meshes = [init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",)) for _ in range(2)]

    meshes.append(DeviceMesh(device_type(), [1, 0], mesh_dim_names=("tp",)))
    results: list[list[str]] = []
    for mesh in meshes:
        found = []
        for model in models:
            try:
                for _ in range(2):
                    model(DTensor.from_local(batch(), mesh, [Replicate()], run_check=False)).square().mean().backward()
                found.append("ran")
            except Exception as problem:
                found.append(type(problem).__name__)
        results.append(found)
    assert all(one[0] == one[1] for one in results) and results[0] == ["ran", "ran"], results
    return None


def local_functions() -> Any:
    """A class that nothing names, whose function cannot be found after ``gc.freeze``: calls are compared."""

    class Local(Reads):
        @property
        def scale(self) -> Any:
            return self.mlp.up.weight.sum() if _is_whole() else 2.0

        def between(self, h: torch.Tensor) -> torch.Tensor:
            return h * self.scale

    gc.freeze()
    models = both(Local)
    for step in range(3):
        compare(models, batch(step))
    assert report(models[1]).static_steps == 2 and report(models[1]).recordings == 1, report(models[1])
    return None


CASES = (values_that_change, unreached_branches, local_functions, global_containers, other_meshes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_held_values(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)
