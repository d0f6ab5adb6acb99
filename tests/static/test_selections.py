"""Values that decide which of several tensors is used, without a branch: as in eager mode."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both, same
from vescale import Plan
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")


def plan_of(mesh: DeviceMesh) -> Plan:
    return Plan(mesh).shard("cut.(weight|bias)", Shard(0)).shard("cut.<in>", Replicate())


class Base(nn.Module):
    """The result of ``cut`` is a part on each rank, that of ``whole`` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.whole = nn.Linear(8, 16), nn.Linear(8, 16)

    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.cut(x), self.whole(x)
        picked = self.pick(a, b, int(x[0, 0] > 0))
        return torch.tanh(picked).square().sum() + a.square().sum() + b.square().sum()


class Item(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        pair = (a, b)
        return pair[i]


class OfResults(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        i = int(x[0, 0] > 0)
        return torch.tanh([self.cut(x), self.whole(x)][i]).square().sum()


class OfModules(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, ("cut", "whole")[int(x[0, 0] > 0)]).weight
        return torch.tanh(x @ weight.t()).square().sum() + self.cut(x).square().sum() + self.whole(x).square().sum()


class Get(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return {0: a}.get(i, b)


class Keys(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return {i: a, 1 - i: b}[0]


class Pairs(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return dict(zip((i, 1 - i), (a, b)))[0]


class Choice(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return random.Random(3 * i).choice([a, b])


class Largest(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return max([(i, 0, a), (0.5, 1, b)])[2]


class Sorts(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        keys = {id(a): i, id(b): 0.5}
        items = [a, b]
        items.sort(key=lambda x: keys[id(x)])
        return items[0]


class Unpacks(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        first, _ = [a, b][:: 1 - 2 * i]
        return first


class Iterates(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        waiting = iter([a, b])
        return next(itertools.islice(waiting, i, None))


class Filters(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        wanted = {id(a): i, id(b): 1 - i}
        return next(filter(lambda x: wanted[id(x)], [a, b]))


class Inserts(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        items = [a]
        items.insert(i, b)
        return items[0]


class Stores(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        items = [b, b]
        items[i] = a
        return items[0]


class Deletes(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        items = [a, b]
        del items[i]
        return items[0]


class Rotates(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        items = deque((a, b))
        items.rotate(i)
        return items[0]


class Repeats(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return ([a] * (1 - i) + [b])[0]


class Binds(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return functools.partial(operator.getitem, (a, b))(i)


class Attributes(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return getattr(SimpleNamespace(x0=a, x1=b), f"x{i}")


class Names(Base):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return locals()["ab"[i]]


class Indices(Base):
    """A list of indices is read where another one is known."""

    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        indices = []
        indices.append(i)
        return next((a, b)[k] for k in indices)


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "at" in kwargs:
            kwargs["index"] = kwargs.pop("at")
        return function(*args, **kwargs)

    return wrapper


class At(nn.Module):
    @passed_on
    @passed_on
    def forward(self, items: Any, index: int) -> torch.Tensor:
        return items[index]


class Passes(Base):
    """Decorators pass the index of a module on."""

    def __init__(self) -> None:
        super().__init__()
        self.at = At()

    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return self.at((a, b), index=i)


class Renames(Passes):
    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        return self.at((a, b), at=1)


OPEN = [
    *(Item, OfResults, OfModules, Get, Keys, Pairs, Choice, Largest, Sorts, Unpacks, Iterates, Filters, Inserts),
    *(Stores, Deletes, Rotates, Repeats, Binds, Attributes, Names, Indices),
    *(Passes, Renames),
]


class Outputs(OrderedDict[str, torch.Tensor]):
    def __getitem__(self, key: str) -> torch.Tensor:
        return dict(self.items())[key]


class Fixed(Base):
    """Nothing but constants, attributes, loops and the keys of what is unpacked decides."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.names, self.one = 1, ["first", "first"], At()

    def difference(self, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return c - d

    def at(self, items: Any, index: int) -> torch.Tensor:
        return items[index]

    def pick(self, a: torch.Tensor, b: torch.Tensor, i: int) -> Any:
        named = {"first": a, "second": b}
        total = named["first"] + self.at((a, b), 0) + self.at(items=[b, a], index=self.index)
        alike = [a, a * 2]
        for k in range(2):
            total = total + alike[k]
        for name in set(self.names):
            total = total + named[name]
        total = total + self.one([a, b], self.index) + self.one(index=0, items=[a, b])
        unpacked = {**Outputs(c=a, d=b)}
        total = total + self.difference(**Outputs(c=a, d=b)) + unpacked["c"]
        return total + alike[i]


def steps(build: Any, num_steps: int = 3) -> Any:
    models = both(build, plan_of)
    for step, sign in enumerate((-1, 1, -1, -1, 1)[:num_steps]):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        x[0, 0] = sign * x[0, 0].abs()
        outputs = []
        for model in models:
            model.zero_grad()
            outputs.append(model(x))
            outputs[-1].backward()
        assert same(*outputs), (build, step, report(models[1]))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert (p.grad is None) == (q.grad is None) and (p.grad is None or same(p.grad, q.grad)), (build, step)
    return report(models[1])


def open_choices(names: Any) -> None:
    for build in names:
        found = steps(build, 5)
        # Where it is in a part of the model, that runs in eager mode; otherwise, calls are compared one by one.
        reason = "a value may decide" if build in (Passes, Renames) else "was not recorded at this place"
        assert reason in str(found), (build, found)


@pytest.mark.parametrize("names", [OPEN[::3], OPEN[1::3] + OPEN[2::3]], ids=["some", "others"])
def test_open_choices(ranks: RankPools, names: Any) -> None:
    ranks.run(open_choices, names, world_size=2)


def test_fixed_choices(ranks: RankPools) -> None:
    for found in ranks.run(steps, Fixed, 5, world_size=2):
        assert found.static_steps == 4 and not found.fallbacks, found
