"""Convolutions over every placement of input and weight against one device: values, gradients and placements."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import implicit_communication

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def double(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def place(whole: torch.Tensor | None, mesh: Any, placements: Any) -> Any:
    if whole is None:
        return None
    cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    if not whole.is_contiguous():
        local = cut.to_local().contiguous(memory_format=torch.channels_last)
        cut = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
    return cut.requires_grad_()


def same(mesh: Any, function: Any, operands: Any, placed: Any, result: Any = None) -> None:
    """``function(input, weight, bias)`` of plain tensors and of DTensors; ``result``: the placements of the DTensor."""
    plain = [None if x is None else x.clone().requires_grad_() for x in operands]
    cut = [place(x, mesh, placements) for x, placements in zip(operands, placed, strict=True)]
    expected, found = function(*plain), function(*cut)
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert result is None or found.placements == result, found.placements
    torch.testing.assert_close(found.full_tensor(), expected)
    weight = double(*expected.shape, seed=9)
    (expected * weight).sum().backward()
    found.backward(distribute_tensor(weight, mesh, [R] * mesh.ndim, src_data_rank=None))
    for own, other in zip(cut, plain, strict=True):
        if own is not None:
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)


def every_placement(channels: int, out: int, batch: int) -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))  # what installs the handlers
    pairs = list(itertools.product((R, S0, S1, S2), (R, S0, S1)))
    flat = (double(batch, channels, 5, seed=1), double(out, channels, 3, seed=2), double(out, seed=3))
    cases: list[Any] = [
        (mesh, lambda x, w, b: F.conv1d(x, w, b, padding=1), flat, ((x, R), (w, R), (R, R))) for x, w in pairs
    ]
    image = (double(batch, channels, 6, 5, seed=1), double(out, channels, 3, 2, seed=2), double(out, seed=3))
    cases += [
        (mesh, lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=(1, 0)), image, ((S0, x), (R, w), (R, R)))
        for x, w in pairs
    ]
    # Both axes cut channels.
    cases += [
        (mesh, F.conv2d, image, ((x, x2), (w, w2), (R, S0)))
        for (x, w), (x2, w2) in itertools.product([(R, S0), (S1, S1), (R, R)], repeat=2)
    ]
    back = (double(batch, channels, 4, 3, seed=1), double(channels, out, 2, 3, seed=2), double(out, seed=3))
    cases += [
        (mesh, lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1), back, ((x, R), (w, R), (R, R)))
        for x, w in pairs
    ]
    return run_cases(same, cases)


def test_every_placement(ranks: RankPools) -> None:
    assert set(ranks.run(every_placement, 4, 6, 4)) == {45}


def test_uneven_and_empty_shards(ranks: RankPools) -> None:
    assert set(ranks.run(every_placement, 3, 5, 3)) == {45}
    assert set(ranks.run(every_placement, 1, 3, 1)) == {45}


def groups() -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    x, bias = double(3, 8, 5, 4, seed=1), double(16, seed=3)
    cases: list[Any] = []
    for num_groups in (2, 4, 8):
        grouped = (x, double(16, 8 // num_groups, 3, 3, seed=2), bias)
        back = (x, double(8, 16 // num_groups, 3, 3, seed=2), bias)
        for placed in itertools.product(((R, S1), (S1, S1), (R, R), (S0, S1)), ((R, R), (S0, R), (R, S0), (S0, S0))):
            expected = (*placed, (R, R))
            cases.append(
                (mesh, lambda *a, g=num_groups: F.conv2d(*a, dilation=2, padding=2, groups=g), grouped, expected)
            )
            cases.append((mesh, lambda *a, g=num_groups: F.conv_transpose2d(*a, groups=g), back, expected))
    return run_cases(same, cases)


def test_groups(ranks: RankPools) -> None:
    assert set(ranks.run(groups)) == {96}


def results() -> int:
    """The placements of the module's table, and no communication on the way to them."""
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    plain = (double(4, 4, 5, 5, seed=1), double(6, 4, 3, 3, seed=2), double(6, seed=3))
    deep = (plain[0], double(8, 1, 3, 3, seed=2), double(8, seed=3))
    cases: list[tuple[Any, ...]] = [
        (F.conv2d, plain, (S0, R), (R, R), (S0, R)),
        (F.conv2d, plain, (S0, R), (R, S0), (S0, S1)),
        (F.conv2d, plain, (S0, S1), (R, S1), (S0, Partial())),
        (F.conv2d, plain, (S0, R), (R, S1), (S0, Partial())),
        (lambda x, w, b: F.conv2d(x, w, b, groups=4), deep, (S0, S1), (R, R), (S0, S1)),
        (lambda x, w, b: F.conv2d(x, w, b, groups=4), deep, (S0, R), (R, S0), (S0, S1)),
    ]
    for function, operands, x, weight, result in cases:
        cut = [place(t, mesh, p) for t, p in zip(operands, (x, weight, (R, R)), strict=True)]
        with record_comms() as comms:
            assert function(*cut).placements == result
        assert comms.count() == 0, comms
    return len(cases)


def test_results_lie_as_the_table_says(ranks: RankPools) -> None:
    assert set(ranks.run(results)) == {6}


def formats() -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))
    operands = (double(4, 4, 6, 6, seed=1).to(memory_format=torch.channels_last), double(6, 4, 3, 3, seed=2), None)
    volume = (double(4, 4, 3, 4, 5, seed=1), double(6, 4, 2, 2, 2, seed=2), double(6, seed=3))
    return run_cases(
        same,
        [
            (mesh, F.conv2d, operands, ((S0, R), (R, R), (R, R)), (S0, R)),
            (mesh, F.conv3d, volume, ((S0, R), (R, S0), (R, R)), (S0, S1)),
            (mesh, lambda x, w, b: F.conv2d(x[0], w, b), operands, ((S1, R), (R, S0), (R, R))),
        ],
    )


def test_memory_formats_volumes_and_single_images(ranks: RankPools) -> None:
    assert set(ranks.run(formats)) == {3}


class Tower(nn.Module):
    """Channels are cut between the first and the last convolution, as Megatron cuts the hidden dim of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.deep(F.relu(self.up(x)))))


def channel_parallel() -> None:
    mesh = make_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    reference = Tower().double()
    torch.manual_seed(0)
    model = Tower().double()
    plan = Plan(mesh)
    plan.shard("<in:x>", {"dp": S0})
    plan.shard(r"(up|deep)\.weight", {"tp": S0})
    plan.shard(r"(up|deep)\.bias", {"tp": S0})
    plan.shard("down.weight", {"tp": S1})
    plan.shard("down.<out>", {"tp": R})
    plan.shard("up.<in>", {"tp": R})
    parallelize(model, plan, strict=True)
    x = double(4, 3, 6, 6, seed=5)
    reference(x).square().mean().backward()
    with record_comms() as comms:
        found = model(x)
    assert comms.count() == comms.count("all_reduce") == 1, comms
    assert isinstance(found, DTensor)
    found.square().mean().backward()
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad, msg=name)
    assert not implicit_communication(model)


def test_channel_parallel_tower_takes_one_all_reduce(ranks: RankPools) -> None:
    ranks.run(channel_parallel)
