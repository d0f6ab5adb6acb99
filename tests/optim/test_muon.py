"""``Muon`` on any mesh against one device, and on one device against ``torch.optim.Muon``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from tests.examples import NIGHTLY
from tests.optim.meshes import FSDP_TP, GRIDS, LINES, Case, assert_equal, build, missing_gradients, set_gradients
from tests.ranks import RankPools, run_cases
from vescale.optim import Muon


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(
    "nesterov,dtype",
    # In bfloat16 without Nesterov torch normalizes the momentum buffer itself, which it takes for its copy.
    [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)],
)
def test_one_device_has_the_bits_of_torch(adjust: str, nesterov: bool, dtype: torch.dtype) -> None:
    shapes = [(17, 33), (64, 9), (1, 40), (30, 1), (12, 12)]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    theirs = copy.deepcopy(ours)
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "ns_steps": 4}
    optimizer = Muon(ours, norm_dtype=None, adjust_lr=adjust, coefficients=(3.0, -4.0, 2.0), **options)
    reference = torch.optim.Muon(theirs, adjust_lr_fn=adjust, ns_coefficients=(3.0, -4.0, 2.0), **options)
    for step in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.zeros_like(a) if step == 2 else torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"])


def steps_equal_one_device(cases: list[Case], num_steps: int, options: dict[str, Any]) -> None:
    own, reference = build(cases)
    optimizer, alone = Muon(own, **options), Muon(reference, **options)
    for step in range(num_steps):
        set_gradients(own, reference, step)
        optimizer.step()
        alone.step()
    assert_equal(optimizer, alone)


OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02, "bucket_bytes": 1000},
    {"lr": 0.02, "norm_dtype": None, "split_replicas": False},
    {
        "lr": torch.tensor(0.02),
        "ns_dtype": torch.float32,
        "nesterov": False,
        "adjust_lr": "spectral",
        "bucket_bytes": 1,
    },
]


STEPS = 20 if NIGHTLY else 10


def on_lines(num_ranks: int) -> int:
    cases = [(LINES[num_ranks], STEPS if i == 0 else 4, options) for i, options in enumerate(OPTIONS)]
    return run_cases(steps_equal_one_device, cases)


def on_grids() -> int:
    return run_cases(steps_equal_one_device, [(GRIDS, STEPS if i == 0 else 4, o) for i, o in enumerate(OPTIONS)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_has_the_bits_of_one_device(ranks: RankPools, num_ranks: int) -> None:
    assert set(ranks.run(on_lines, num_ranks, world_size=num_ranks)) == {len(OPTIONS)}


def test_has_the_bits_of_one_device_on_two_axes(ranks: RankPools) -> None:
    assert set(ranks.run(on_grids, world_size=4)) == {len(OPTIONS)}


def test_missing_gradients(ranks: RankPools) -> None:
    ranks.run(missing_gradients, Muon, {"lr": 0.1}, world_size=4)


def part_of_the_ranks() -> None:
    """A matrix of one row is whole along an axis, so that two of four ranks alone have something to send; all compare."""
    case = (FSDP_TP, (1, 20), (Shard(0), Shard(1)), None)
    own, reference = build([case])
    optimizer, alone = Muon(own, lr=0.1), Muon(reference, lr=0.1)
    for step in range(3):
        set_gradients(own, reference, step)
        if step == 1:  # also where a rank lacks its part
            if dist.get_rank() == 0:
                optimizer.param_groups[0]["params"][0].grad = None
            alone.param_groups[0]["params"][0].grad[:, :10] = 0
        optimizer.step()
        alone.step()
    assert_equal(optimizer, alone)


def test_matrices_that_part_of_the_ranks_hold(ranks: RankPools) -> None:
    ranks.run(part_of_the_ranks, world_size=4)
