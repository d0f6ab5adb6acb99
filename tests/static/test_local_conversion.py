"""Conversions of local tensors in one call do what the three calls do: values, gradients, and gradients of gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.compat import native_static, no_torch_function
from vescale.ops import PreparedConversion, enter_local, leave_local

pytestmark = pytest.mark.helper("dispatch")

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())
GLOBAL = (4, 6)


def local_like(placement: Any, size: int, seed: int) -> torch.Tensor:
    shape = [n // size if isinstance(placement, Shard) and placement.dim == d else n for d, n in enumerate(GLOBAL)]
    same = not isinstance(placement, Shard | Partial)
    generator = torch.Generator().manual_seed(seed + (0 if same else 1 + dist.get_rank()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def derivatives(function: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The result, its gradient, and a gradient of the gradient."""
    x, grad = x.clone().requires_grad_(), grad.clone().requires_grad_()
    with no_torch_function():
        result = function(x)
        once = torch.autograd.grad(result, x, grad, create_graph=True)[0]
        twice = torch.autograd.grad(once.square().sum(), grad)[0]
        plain = torch.autograd.grad(function(x), x, grad)[0]
    assert torch.equal(plain, once)
    return [result.detach(), once.detach(), twice]


def all_pairs() -> int:
    size, count = dist.get_world_size(), 0
    mesh = init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))
    parallelize(nn.Linear(2, 2), Plan(mesh))  # which installs the C++ dispatcher
    for before, after in itertools.product(PLACEMENTS, PLACEMENTS[:3]):
        for arrives in (after, Partial()) if after == Replicate() else (after,):
            move = PreparedConversion((before,), (after,), (None, None), "test")
            factors = tuple(size if before == Shard(dim) else 1 for dim in range(2))
            accepted: list[Any] = []
            one_call = native_static().LocalConversion(
                mesh, (before,), factors, (), None, move.target, move.stages, "test", (arrives,), accepted.append
            )

            def three_calls(x: torch.Tensor, move: Any = move, before: Any = before, arrives: Any = arrives) -> Any:
                return enter_local(move(leave_local(x, mesh, (before,), GLOBAL, "test")), (arrives,))

            assert one_call(torch.zeros_like(local_like(before, size, 1))) is not None, (before, after, arrives)
            x, grad = local_like(before, size, 1), local_like(arrives, size, 10)
            expected, found = derivatives(three_calls, x, grad), derivatives(one_call, x, grad)
            assert all(map(torch.equal, found, expected)), (before, after, arrives)
            assert [tuple(spec.placements) for spec in accepted] == [(after,)]
            count += 1
    return count


@pytest.mark.parametrize("world_size", [2])
def test_all_pairs_of_placements(ranks: RankPools, world_size: int) -> None:
    assert set(ranks.run(all_pairs, world_size=world_size)) == {16}
