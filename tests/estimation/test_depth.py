"""Equal blocks that are left out count as if they had run: bytes of every rank, and of collectives, are those of all.

Stable Diffusion 3 is left out: it is built without a number of layers.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.estimation.test_zoo_bytes import is_of_tokens, loss_of_outputs, plan_of
from tests.plan_zoo.models import model_of, tokens
from vescale import plan_zoo
from vescale.estimation import Estimate, estimate, zero_plan, zero_units
from vescale.plans import Plan

_BLOCKS = 5
_OTHERS = {("sd3", None), ("sd3", 3)}
_CATEGORIES = ("parameters", "gradients", "optimizer", "unsharded", "input", "activations")


def deep(name: str) -> nn.Module:
    """The zoo's model with five blocks for two."""
    build = model_of(name).build
    cells = dict(zip(build.__code__.co_freevars, build.__closure__ or ()))
    sizes = cells["sizes"].cell_contents
    more = {key: _BLOCKS if "layer" in key and value == 2 else value for key, value in sizes.items()}
    try:
        cells["sizes"].cell_contents = more
        return build().double()
    finally:
        cells["sizes"].cell_contents = sizes


def most(found: Estimate, rank: int) -> dict[str, int]:
    (own,) = (one for one in found.ranks if rank in one.ranks)
    return {name: own.maximum[name] for name in _CATEGORIES}


class _Deep(nn.Module):
    """Blocks whose parameters are larger than their activations."""

    def __init__(self, calls_inside: bool = False) -> None:
        super().__init__()
        self.calls_inside = calls_inside
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.calls_inside:
            x = self.blocks[0][0](x)
        return x.square().mean()


def estimates(model: nn.Module, stage: int, shape: tuple[int, ...] = (4, 32)) -> tuple[Estimate, ...]:
    """With the first and the last block, and with all of them."""
    plan = zero_plan(Plan({"dp": 2}).shard("<in:x>", {"dp": Shard(0)}), ("dp",), stage, zero_units(model))
    given = {"batch": {"x": shape}, "optimizer": "sgd", "steps": 2}
    return tuple(estimate(model, plan, **given, reduce_depth=each) for each in (True, False))


@pytest.mark.parametrize("stage", [1, 3])
def test_when_blocks_that_are_left_out_have_memory(stage: int) -> None:
    """Gradients of other blocks are there before the backward of the first one, which stands for them, and what stage 1
    keeps gathered is not."""
    reduced, whole = estimates(_Deep(), stage)
    assert reduced.peak_bytes == whole.peak_bytes
    assert most(reduced, 0) == most(whole, 0)


def test_a_first_block_that_is_used_as_no_other() -> None:
    """The second one stands for the rest."""
    reduced, whole = estimates(_Deep(calls_inside=True), 3)
    assert reduced.time.collective_bytes == whole.time.collective_bytes
    assert most(reduced, 0) == most(whole, 0)


class _WorkBetween(_Deep):
    """What the forward does before each block, and between two of them, is drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(32, 32), nn.Linear(32, 1)
        self.kinds = draw.sample(["shared", "wide", "product", "skip"], 2)
        self.is_before = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.first(x)
        for block in self.blocks:
            x = x + first.sin() if self.is_before else x
            x = block(x)
            x = x + self.shared(x) if "shared" in self.kinds else x
            x = torch.cat([x] * 8, -1).sigmoid().exp().unflatten(-1, (-1, 8)).sum(-1) if "wide" in self.kinds else x
            x = x @ x.mT @ x if "product" in self.kinds else x
            x = x + first if "skip" in self.kinds else x
        return self.head(x).square().mean()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_what_a_forward_does_between_blocks(seed: int) -> None:
    """It counts as often as there are blocks."""
    draw = random.Random(seed)
    reduced, whole = estimates(_WorkBetween(draw), draw.choice([1, 3]), shape=(8, 16, 32))
    assert most(reduced, 0) == most(whole, 0)
    assert reduced.peak_bytes == whole.peak_bytes
    assert reduced.time.collective_bytes == whole.time.collective_bytes
    assert reduced.time.seconds == pytest.approx(whole.time.seconds, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"), [one for one in itertools.product(plan_zoo.names(), (None, 3)) if one not in _OTHERS]
)
def test_blocks_that_are_left_out(name: str, stage: int | None) -> None:
    model_of(name).need()
    sizes = {axis: {"dp": 2, "tp": 2}.get(axis, 1) for axis in plan_zoo.about(name).axes}
    inputs = model_of(name).inputs()
    if "cp" in sizes:
        sizes, inputs = sizes | {"cp": 2, "tp": 1}, {"input_ids": tokens()}
    model = deep(name)
    plan = plan_of(name, sizes, stage, model)
    given = {"batch": inputs, "loss": loss_of_outputs, "steps": 2}
    reduced, whole = (estimate(model, plan, **given, reduce_depth=each) for each in (True, False))
    assert any("equal modules were run" in note for note in reduced.notes)
    for rank in range(math.prod(sizes.values())):
        assert most(reduced, rank) == most(whole, rank), rank
    moved = [{k: v for k, v in one.time.collective_bytes.items() if not is_of_tokens(k)} for one in (reduced, whole)]
    assert moved[0] == pytest.approx(moved[1], abs=1)  # of which parameters got a gradient, a byte each
    assert reduced.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.015)
