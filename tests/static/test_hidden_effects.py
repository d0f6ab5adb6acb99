"""What a forward does besides calling torch functions: the bits of eager mode, or eager mode with a reason."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both, same
from vescale import Plan
from vescale.errors import StaticStepError
from vescale.static import report
from vescale.static._gradients import shown_local

pytestmark = pytest.mark.helper("dispatch")

SIGNS = (-1, -1, 1, -1, 1, 1, -1)  # of the first element; steps with 1 differ from the recorded one


def tp_plan(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh).shard(".*up.(weight|bias)", Shard(0)).shard(".*up.<in>", Replicate())
    return plan.shard("down.weight", Shard(1)).shard("down.<out>", Replicate())


def data_plan(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("<in>", Shard(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.hidden(x))


class Branches(Base):
    """What runs before the branch is repeated in eager mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if is_odd(x):
            h = torch.relu(h)
        return self.down(h)


def is_odd(x: torch.Tensor) -> bool:
    return bool(x[0, 0, 0] > 0)


# Values that a forward changes: a step that is repeated in eager mode changes them once.

STATE = {"steps": 0}
STEPS = 0


class ByGlobal(Branches):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        global STEPS
        STEPS += 1
        return torch.softmax(self.up(x), STEPS // 4 % 2 + 1)


class ByTable(Branches):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        STATE["steps"] += 1
        return self.up(x) / STATE["steps"]


class OfClass(Branches):
    steps = 0

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        type(self).steps += 1
        return torch.softmax(self.up(x), self.steps // 4 % 2 + 1)


class Advances(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.log, self.kept = SimpleNamespace(steps=0), SimpleNamespace(seen=[]), [torch.zeros(1)]
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.numpy, self.array = np.random.default_rng(1), np.zeros(1)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        self.config.steps += 1
        self.log.seen.append(float(x[0, 0, 0]))
        self.kept[0].add_(1)
        self.array += 1
        drawn = torch.rand(16, generator=self.torch) * self.python.random() * self.numpy.random()
        return self.up(x) * drawn[0] * self.kept[0] * self.array[0] / self.config.steps * len(self.log.seen)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return h / self.steps


class CountsInside(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.counter(self.up(x))


class Iterates(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * next(self.count)


# Tensors that stay for other steps, or come from elsewhere than recorded functions.

KEPT: Any = None


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length).unsqueeze(-1)


class Caches(Branches):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x + positions(x.shape[1]))


class KeepsGlobal(Branches):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        global KEPT
        before, KEPT = KEPT, self.up(x)
        return KEPT if before is None or before.shape != KEPT.shape else KEPT + before.detach()


def _averages() -> Any:
    mean: Any = 0.0

    def hidden(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal mean
        h = self.up(x)
        mean = mean * 0.5 + h.detach().mean((0, 1))
        return h + mean

    return hidden


class KeepsInClosure(Branches):
    hidden = _averages()


class InThread(Base):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.softmax, self.up(x), 1 + is_odd(x)).result()


def product(h: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(h, dim) * h


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(product)


class Scripted(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(scripted(self.up(x), 1 + int(is_odd(x))))


class Normalizes(torch.autograd.Function):
    """Only its backward is not that of local tensors."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, scale: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        ctx.save_for_backward(h, scale)
        return h * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        h, scale = ctx.saved_tensors
        return torch.softmax(grad * scale, ctx.dim), (grad * h).sum(), None


class OwnBackward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Normalizes.apply(self.up(x), self.scale, 1 + is_odd(x)))


# Ways through a function that no branch tells.

TABLE = {0: 1.0}


class Suppresses(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        with contextlib.suppress(KeyError):
            TABLE[int(is_odd(x))]
            h = self.down(h)
        return torch.relu(h).sum((1, 2))


class SuppressesReturn(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(KeyError):
            return self.down(self.up(x)) * TABLE[int(is_odd(x))]
        return F.linear(torch.softmax(F.linear(x, self.up.weight), -1), self.down.weight)


class Disables(Base):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(is_odd(x)):
            return torch.softmax(self.up(x), 1)


class Helper(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.dim = nn.Linear(8, 16), dim

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.up.weight)
        return h.softmax(self.dim)


class PicksModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.helpers = nn.ModuleList([Helper(1), Helper(2)])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        helpers: Any = self.helpers
        return helpers[int(is_odd(x))].mixed(x)


class Reads:
    def __get__(self, owner: Any, kind: Any = None) -> int:
        return int(os.environ["HIDDEN_DIM"])


class ByDescriptor(Base):
    dim = Reads()
    other = property(lambda self: int(os.environ["HIDDEN_DIM"]))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).softmax(self.dim)


class ByProperty(ByDescriptor):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).softmax(self.other)


class DimsInReshape(Base):
    """Its number of dims changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x[:, :6].reshape(*[2, 2] * (not is_odd(x)), *[4] * is_odd(x), 6, 8))).sum()


def arguments(name: str) -> type[Base]:
    """Dims beside numbers, lists, and arguments that PyTorch's own wrappers add."""
    functions: dict[str, Any] = {
        "normalize": lambda h, dim: F.normalize(h, dim=dim),
        "norm": lambda h, dim: h / (1 + h.abs().norm(1.5, dim, True)),
        "index_fill": lambda h, dim: h.index_fill(dim, torch.tensor([0, 3]), 0.5),
        "packet": lambda h, dim: torch.ops.aten._softmax(h, dim, False),
    }
    call = functions[name]
    return type(name, (Base,), {"hidden": lambda self, x: call(self.up(x), 1 + is_odd(x))})


class Joins(Base):
    """A list of tensors is one argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        parts, dim = [h, torch.tanh(h)], 1 + is_odd(x)
        y = torch.cat(parts, dim)
        return (y.softmax(1) * y).sum() / y.numel()


def start() -> None:
    global STEPS, KEPT
    STEPS, KEPT, STATE["steps"], OfClass.steps = 0, None, 0, 0
    KeepsInClosure.hidden = _averages()
    positions.cache_clear()


def batch(step: int) -> torch.Tensor:
    x = torch.randn(4, 6 + 2 * (step == 2), 8, generator=torch.Generator().manual_seed(step))
    x[0, 0, 0] = SIGNS[step] * x[0, 0, 0].abs()
    return x


def steps(build: Any, plan: Any, loss: Any = None) -> Any:
    models, found = both(build, plan), list[list[Any]]()
    for model in models:
        start()
        rows: list[Any] = []
        found.append(rows)
        for step in range(len(SIGNS)):
            model.zero_grad()
            x = batch(step)
            os.environ["HIDDEN_DIM"] = str(1 + is_odd(x))
            outputs = model(x)
            outputs.square().mean().backward()
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            rows.append([outputs.detach(), x, *grads])
    for step, (eager, static) in enumerate(zip(*found, strict=True)):
        for a, b in zip(eager, static, strict=True):
            assert (a is None and b is None) or same(a, b), (build, step, report(models[1]))
    return report(models[1])


CHANGED = (ByGlobal, ByTable, OfClass, Advances, CountsInside)
EAGER = {
    Iterates: "may advance the iterator count",
    Caches: "keeps tensors",
    KeepsGlobal: "keeps tensors",
    KeepsInClosure: "keeps tensors",
    InThread: "comes from another thread",
    Scripted: "comes from another thread, another step, or compiled code",
    OwnBackward: "the backward of this function",
}
COMPARED = (
    Disables,
    PicksModule,
)  # call by call, because a value decides which tensors are used, or if there are gradients
REFUSED = (
    *(Suppresses, SuppressesReturn, ByDescriptor, ByProperty, DimsInReshape, Joins),
    *map(arguments, ("normalize", "norm", "index_fill", "packet")),
)


def changed_values() -> None:
    for build in CHANGED:
        found = steps(build, tp_plan)
        assert found.static_steps > 0 and "was not recorded" in str(found), (build, found)


def eager_models(builds: Any) -> None:
    for build in builds:
        found = steps(build, data_plan if build in (Caches, OwnBackward) else tp_plan)
        assert found.static_steps == 0 and EAGER[build] in str(found), (build, found)


def compared_models() -> None:
    for build in COMPARED:
        found = steps(build, tp_plan)
        assert found.static_steps > 0, (build, found)
        assert "was not recorded at this place" in str(found), (build, found)


def refused_steps() -> None:
    for build in REFUSED:
        found = steps(build, tp_plan if build is not DimsInReshape else data_plan)
        assert found.static_steps > 0 and found.fallbacks, (build, found)


@pytest.mark.parametrize("case", [changed_values, compared_models, refused_steps], ids=lambda case: case.__name__)
def test_steps(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)


@pytest.mark.parametrize("builds", [list(EAGER)[::2], list(EAGER)[1::2]], ids=["some", "others"])
def test_eager_models(ranks: RankPools, builds: Any) -> None:
    ranks.run(eager_models, builds, world_size=2)


class Appends(Base):
    def forward(self, x: torch.Tensor, held: Any) -> torch.Tensor:  # type: ignore[override]
        held["h"] = self.up(x)
        return self.down(held["h"])


class WritesInput(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.mul_(2)))


def inputs() -> None:
    models = both(Appends, tp_plan)
    for step in range(3):
        given: list[Any] = [{}, {}]
        for model, held in zip(models, given, strict=True):
            model(batch(step), held).square().mean().backward()
        assert same(given[0]["h"], given[1]["h"]), step
    assert "changes what an input holds" in str(report(models[1]))
    assert steps(WritesInput, data_plan).static_steps == len(SIGNS) - 1


def missing_gradients() -> None:
    """A parameter that got no gradient in the recorded step does not lose a later one."""
    weight: Any = both(Base, data_plan)[1].get_parameter("down.weight")
    with pytest.raises(StaticStepError, match="the parameter weight"):
        shown_local(weight, None, "weight").sum().backward()


@pytest.mark.parametrize("case", [inputs, missing_gradients], ids=lambda case: case.__name__)
def test_inputs_and_outputs(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)
