"""Steps that give functions other arguments, or go another way, than the recorded one: as in eager mode, or not at all."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both
from vescale import Plan
from vescale.static import report
from vescale.static._forward import PAUSED, Pauses
from vescale.static._program import TapeProgram

pytestmark = pytest.mark.helper("dispatch")


def batch(seed: int, length: int = 6) -> torch.Tensor:
    return torch.randn(4, length, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plan_of(mesh: Any) -> Plan:
    plan = Plan(mesh).shard("up.(weight|bias)", Shard(0)).shard("up.<in>", Replicate())
    return plan.shard("down.weight", Shard(1)).shard("down.<out>", Replicate())


class Base(nn.Module):
    """``up`` is cut by columns: dim 1 of its result is whole on each rank, and dim 2 is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.double()

    def dim(self, x: torch.Tensor) -> int:
        return 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(torch.softmax(h, self.dim(x)) * h)


class ViewBySize(Base):
    """Equal arguments, which mean the columns of a rank in the recorded step, and parts of several rows in others."""

    is_read = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.flatten(0, 1)).view(8 + int(x[0, 0, 0] > 9) if self.is_read else 8, -1)


class ViewByRead(ViewBySize):
    is_read = True


class Splits(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(x).split(2)
        return self.down(first * second)


def steps(build: Callable[[], nn.Module], lengths: Any) -> Any:
    models = both(build, plan_of)
    for step, length in enumerate(lengths):
        outputs = []
        for model in models:
            model.zero_grad()
            outputs.append(model(batch(step, length)))
            outputs[-1].square().mean().backward()
        eager, static = (out.full_tensor() for out in outputs)
        assert torch.allclose(eager, static, rtol=1e-12), (step, report(models[1]))
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert (p.grad is None) == (q.grad is None), step
            if p.grad is not None:
                assert torch.allclose(p.grad.to_local(), q.grad.to_local(), rtol=1e-9, atol=1e-15), step
    return models[1]


def equal_arguments_of_other_sizes() -> None:
    for build in (ViewBySize, ViewByRead):
        found = report(steps(build, (2, 2, 2, 4, 2)))
        assert found.static_steps == 3 and "in place of (Shard(dim=1),)" in str(found), found


def tensors_of_checked_calls() -> None:
    """A function that is a method of a tensor, which Python defines, keeps no tensor."""

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    model, x = both(Splits, plan_of)[1], batch(0)
    counts = []
    for _ in range(8):
        model(x).square().mean().backward()
        counts.append(num_tensors())
    assert report(model).static_steps == 7 and min(counts[-3:]) <= max(counts[2:4]), counts


class Branches(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        kind = int(x[0, 0, 0])
        if kind == 1:
            h = torch.softmax(h, 2) * h
        elif kind == 2:
            h = torch.tanh(h)
        return self.down(h)


def ways_that_last() -> None:
    """The first step of another way is recorded, and ways that were recorded are taken up again."""
    models = both(Branches, plan_of)
    static_steps, recordings = [], []
    for kind in (0, 1, 0, 1, 2, 0, 2):
        before = report(models[1])
        for step in range(12):
            x = batch(step)
            x[0, 0, 0] = kind
            outputs = [model(x) for model in models]
            for model, out in zip(models, outputs, strict=True):
                model.zero_grad()
                out.square().mean().backward()
            assert torch.equal(*(out.full_tensor() for out in outputs)), (kind, step)
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p.grad.to_local(), q.grad.to_local()), (kind, step)
        static_steps.append(report(models[1]).static_steps - before.static_steps)
        recordings.append(report(models[1]).recordings - before.recordings)
    assert recordings == [1, 1, 0, 0, 1, 0, 0], (recordings, report(models[1]))
    assert static_steps == [11, 11, 12, 12, 11, 12, 12], (static_steps, report(models[1]))


class Draws(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        for function in (torch.tanh, torch.relu, torch.sigmoid, torch.sin, torch.cos):
            if random.random() < 0.5:
                h = function(h)
        return self.down(h)


class DrawsFew(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if random.random() < 0.8:
            h = torch.tanh(h)
        return self.down(torch.relu(h) if random.random() < 0.5 else h)


def ways_that_change_always() -> None:
    """Four of them have tapes; of many, nearly no step runs twice after the first ones."""
    found, num_tries = drawn_steps(DrawsFew, 60)
    assert found.static_steps == 56 and found.recordings == 4, found
    found, num_tries = drawn_steps(Draws, 300)
    assert PAUSED in str(found) and num_tries - found.static_steps < 4 * 60, (num_tries, found)


def drawn_steps(build: type[Base], num_steps: int) -> tuple[Any, int]:
    """A report, and how many tapes were tried."""
    models = both(build, plan_of)
    with pytest.MonkeyPatch.context() as patch:
        tries: list[bool] = []
        patch.setattr(TapeProgram, "run", _counted(TapeProgram.run, tries))
        for step in range(num_steps):
            outputs = []
            for model in models:
                random.seed(step)
                model.zero_grad()
                outputs.append(model(batch(step)))
                outputs[-1].square().mean().backward()
            assert torch.equal(*(out.full_tensor() for out in outputs)), step
    return report(models[1]), len(tries)


def _counted(run: Any, tries: list[bool]) -> Any:
    def counted(*args: Any) -> Any:
        tries.append(True)
        return run(*args)

    return counted


CASES = (
    *(equal_arguments_of_other_sizes, tensors_of_checked_calls),
    *(ways_that_last, ways_that_change_always),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_other_paths(ranks: RankPools, case: Any) -> None:
    ranks.run(case, world_size=2)


def test_pauses() -> None:
    """They are twice as long each time, and end with steps that succeed."""
    pauses = Pauses()

    def pause() -> int:
        count = 0
        while pauses.skips("key"):
            count += 1
        return count

    lengths = []
    for _ in range(9):
        for _ in range(16):
            assert not pauses.is_on("key")
            pauses.note("key", True)
        lengths.append(pause())
    assert lengths == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    for _ in range(16):
        pauses.note("key", False)
    for failed in [True, False] * 40:
        pauses.note("key", failed)
        assert not pauses.is_on("key")
    for _ in range(16):
        pauses.note("key", True)
    assert pauses.is_on("key") and not pauses.is_on("other") and pause() == 16
