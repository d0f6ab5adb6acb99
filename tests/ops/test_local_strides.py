"""Ops that choose a memory format, or a view, by strides: where ranks hold one row, whose stride may be anything, and where
dims are expanded. Against one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.fresh import run_fresh
from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_step, pair
from tests.whole import whole
from vescale import parallelize
from vescale.placements import distribute_tensor
from vescale.plans import Plan

Tensor = torch.Tensor


def attended(x: Tensor) -> Tensor:
    """Pixels as a sequence, and back."""
    rows, channels, height, width = x.shape
    pixels = x.reshape(rows, channels, height * width).transpose(1, 2)
    pixels = F.scaled_dot_product_attention(pixels[:, None], pixels[:, None], pixels[:, None])[:, 0]
    return pixels.transpose(-1, -2).reshape(rows, channels, height, width)


STEPS: list[Callable[[Tensor], Tensor]] = [
    attended,
    lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:]),
    lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x.contiguous(),
    lambda x: x + attended(x),
    lambda x: attended(x) * x.sigmoid(),
    lambda x: x.transpose(2, 3),
    lambda x: x.permute(2, 1, 0, 3).clone().permute(2, 1, 0, 3),
]

# PyTorch 2.14 takes the result of a group norm for contiguous, whatever its operand is (docs/internals/upstream.md): views
# of it are chosen by strides that no rank has.
_ON_META = torch.empty(2, 8, 4, 4, device="meta", memory_format=torch.channels_last)
_KEEPS_FORMAT = torch.native_group_norm(_ON_META, None, None, 2, 8, 16, 4, 1e-5)[0].stride() == _ON_META.stride()

ENDS: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.group_norm(x, 2),
    lambda x: F.group_norm(x if _KEEPS_FORMAT else x.contiguous(), 4).flatten(1),
    lambda x: F.max_pool2d(x, 2),
    lambda x: F.interpolate(x, scale_factor=2.0),
    lambda x: F.pixel_shuffle(x, 2),
    lambda x: F.conv2d(x, torch.ones_like(x[:1, :, :2, :2]).expand(3, -1, -1, -1)),
    lambda x: F.adaptive_avg_pool2d(x, 1),
    lambda x: x.contiguous().view(x.shape[0], -1),
]


def same_values(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.choice(STEPS) for _ in range(draw.randint(1, 3))]
    end = draw.choice(ENDS)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("axis",))
    one = torch.randn(
        draw.choice([2, 2, 4]), 8, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    cut = distribute_tensor(one, mesh, [Shard(0)])
    for x in (one.requires_grad_(), cut.requires_grad_()):
        made = x
        for step in steps:
            made = step(made)
        made = end(made)
        (made * made.sin()).sum().backward()
        if x is one:
            expected = made
    torch.testing.assert_close(whole(made.detach()), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole(cut.grad), one.grad, rtol=1e-10, atol=1e-12)


def all_cases(seeds: list[tuple[int]]) -> int:
    parallelize(torch.nn.Linear(1, 1), Plan(init_device_mesh(device_type(), (2,), mesh_dim_names=("axis",))))
    return run_cases(same_values, seeds)


def test_drawn_chains_of_views(ranks: RankPools) -> None:
    seeds = [(seed,) for seed in range(60 if NIGHTLY else 3)]
    assert ranks.run(all_cases, seeds, world_size=2) == [len(seeds)] * 2


REDUCTIONS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, dim: x.sum(dim),
    lambda x, dim: x.mean(dim, keepdim=True).sum(dim),
    lambda x, dim: x.logsumexp(dim),
    lambda x, dim: x.sum(dim, keepdim=True).expand_as(x).flatten(1).unflatten(1, x.shape[1:]).sum(dim),
]
ORDERS: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x.permute(1, 0, 2)]


class Grouped(nn.Module):
    """Reduces over a part of a sharded dim, which a view has made: the gradient is expanded, cut, and viewed as it was."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.draw = nn.Linear(8, 16), random.Random(seed)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        draw = random.Random(self.draw.getstate()[1][1])
        inner = draw.choice((2, 4, 8))
        x = torch.tanh(self.up(x)) + more.reshape(-1).reshape(4, 16)
        x = draw.choice(ORDERS)(x.reshape(4, 16 // inner, inner))
        return draw.choice(REDUCTIONS)(x, draw.choice((0, 1, 2)))


def rows(plan: Plan) -> None:
    plan.shard("<in>", Shard(0), mesh="axis")


def columns(plan: Plan) -> None:
    plan.shard("up.(weight|bias)", Shard(0), mesh="axis").shard("<in:more>", Shard(1), mesh="axis")


def same_step(entries: Callable[[Plan], None], seed: int) -> None:
    reference, model = pair(lambda: Grouped(seed), entries, {"axis": 2}, strict=False)
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, dtype=torch.float64, generator=draws)
    more = torch.randn(4, 16, dtype=torch.float64, generator=draws)
    for given in (more[:1].expand(4, 16), more[:, :1].expand(4, 16), more.T.contiguous().T):
        model.zero_grad(), reference.zero_grad()
        assert_same_step(reference, model, x, given, loss=lambda y: (y * y.sin() + y).mean(), max_implicit=100)


def test_views_of_what_is_expanded(ranks: RankPools) -> None:
    cases = list(itertools.product((rows, columns), range(60 if NIGHTLY else 8)))
    assert ranks.run(run_cases, same_step, cases, world_size=2) == [len(cases)] * 2


FACTORED: list[Callable[[Tensor], Tensor]] = [
    torch.linalg.det,
    lambda x: torch.linalg.slogdet(x)[1],
    lambda x: torch.logdet(x @ x.mT),
    lambda x: torch.linalg.solve(x, x.sin()).sum((-1, -2)),
    lambda x: torch.linalg.inv(x).diagonal(dim1=-1, dim2=-2).sum(-1),
]
# As they are in memory.
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.mT.contiguous().mT,
    lambda x: x.repeat_interleave(2, -1)[..., ::2],
    lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
]
TURNS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.mT,
    lambda x: x.mT.contiguous(),
    lambda x: x + x.square().mT,
    lambda x: x.tanh(),
]


class Factors(nn.Module):
    """Functions whose backward goes by whether a matrix is row-major, of parameters and inputs in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, eye = random.Random(seed), 2 * torch.eye(4)
        self.one = nn.Parameter(draw.choice(LAYOUTS)(torch.randn(4, 4) + eye))
        self.many = nn.Parameter(draw.choice(LAYOUTS)(torch.randn(4, 4, 4) + eye))
        self.chosen = [(draw.choice(FACTORED), draw.choice(TURNS)) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        parts = [op(turn(each)) for (op, turn), each in zip(self.chosen, (self.one, self.many, x))]
        return torch.tanh(parts[0] * parts[1] + parts[2])


def first_dims(plan: Plan) -> None:
    plan.shard("one|many", Shard(0), mesh="axis")


def factored(entries: Callable[[Plan], None], seed: int) -> None:
    reference, model = pair(lambda: Factors(seed), entries, {"axis": 2}, strict=False)
    x = torch.randn(4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = random.Random(seed).choice(LAYOUTS)(x + 2 * torch.eye(4))
    assert_same_step(reference, model, x, max_implicit=100, tolerance=1e-9)


def test_functions_that_go_by_the_order_of_a_matrix(ranks: RankPools) -> None:
    cases = list(itertools.product((rows, first_dims), range(60 if NIGHTLY else 8)))
    assert ranks.run(run_cases, factored, cases, world_size=2) == [len(cases)] * 2


ONE_ROW = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vescale import Plan, parallelize

dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
parallelize(torch.nn.Linear(2, 2), Plan(mesh))
local = torch.randn(1, 2, 8).mul_(2)
x = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(1, 4, 8), stride=(32, 8, 1))
normed = lambda x: torch.nn.functional.layer_norm(x, (8,))
for op in (lambda x: x + 1, normed, torch.nn.functional.relu, lambda x: x @ torch.ones(8, 3), lambda x: x.flatten(0, 1)):
    before = x._version, x._local_tensor._version
    op(x)
    assert (x._version, x._local_tensor._version) == before, op
"""


@pytest.mark.parametrize("without", ["", "VESCALE_NO_NATIVE"])
def test_other_strides_are_no_write(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that took them for a write to a module's input brought it back alone, and waited for the others for ever."""
    if without:
        monkeypatch.setenv(without, "1")
    done = run_fresh(ONE_ROW)
    assert done.returncode == 0, done.stderr
