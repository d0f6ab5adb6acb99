"""In-place ops on values that are pending (sums, norms, products) or ragged: what they hold then, against one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.whole import whole
from vescale import parallelize
from vescale.placements import RaggedShard, distribute_tensor
from vescale.plans import Plan

Tensor = torch.Tensor

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(),
    "norm of a list": lambda x: torch._foreach_norm([x])[0],
    "norms of a list": lambda x: torch.stack(torch._foreach_norm([x, x * 2])),
    "largest": lambda x: x.norm(float("inf")),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "maximum": lambda x: x.max(),
    "sums": lambda x: x.sum(0),
    "product": lambda x: x.prod(),
    "itself": lambda x: x,
}

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda x: x.clamp_(max=0.3),
    "sub_": lambda x: x.sub_(5.0),
    "mul_": lambda x: x.mul_(-2.0),
    "neg_": lambda x: x.neg_(),
    "fill_": lambda x: x.fill_(3.0),
    "lerp_": lambda x: x.lerp_(x * 0 - 3.0, 0.5),
    "masked_fill_": lambda x: x.masked_fill_(x < 0.3, 7.0),
    "copy_": lambda x: x.copy_(x * 2 - 1),
    "_foreach_clamp_max_": lambda x: torch._foreach_clamp_max_([x], 0.3),
    "_foreach_sub_": lambda x: torch._foreach_sub_([x], 5.0),
    "_foreach_add_": lambda x: torch._foreach_add_([x], [x * 0 - 3.0]),
    "_foreach_neg_": lambda x: torch._foreach_neg_([x]),
    "_foreach_mul_": lambda x: torch._foreach_mul_([x], -2.0),
    "_foreach_maximum_": lambda x: torch._foreach_maximum_([x], 1.0),
    "_foreach_reciprocal_": lambda x: torch._foreach_reciprocal_([x]),
    "_foreach_neg": lambda x: x.copy_(torch._foreach_neg([x])[0]),
    "_foreach_mul": lambda x: x.copy_(torch._foreach_mul([x], -2.0)[0]),
    "a ratio of trust": lambda x: x.copy_(torch.where(x > 0, torch.where(x.abs() > 0.1, x / (x + 1), 1.0), 1.0)),
}

ROWS: dict[str, Callable[[Tensor], Any]] = {
    "positions": lambda x: x.__setitem__([0, 2], 5.0),
    "a mask": lambda x: x.__setitem__(x > 0.1, 0.0),
    "a row": lambda x: x.__setitem__(1, 3.0),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0, 2]), 5.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones_like(x[:1])),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones_like(x[:1])),
    "scatter_": lambda x: x.scatter_(0, torch.zeros_like(x[:1], dtype=torch.int64), 7.0),
    "sort": lambda x: x.copy_(x.sort(0).values),
}


def same_write(value: str, write: str, placement: Any) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("axis",))
    one = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cut = distribute_tensor(one, mesh, [placement])
    expected, found = VALUES[value](one), VALUES[value](cut)
    made = {**WRITES, **ROWS}[write]
    made(expected), made(found)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(whole(found), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole(cut), one, rtol=1e-12, atol=1e-12)


def all_cases(cases: list[Any]) -> int:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("axis",))
    parallelize(torch.nn.Linear(1, 1), Plan(mesh))  # whose handlers answer for the mesh
    return run_cases(same_write, cases)


def test_writes_to_pending_and_cut_values(ranks: RankPools) -> None:
    placements = Shard(0), RaggedShard((0,), (4, 1))
    cases = list(itertools.product(VALUES, WRITES, placements))
    cases += itertools.product(["itself"], ROWS, placements)
    assert ranks.run(all_cases, cases, world_size=2) == [len(cases)] * 2
