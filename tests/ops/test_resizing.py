"""Ops that change the shape or the memory of a DTensor, inside and outside of a model: as on one device, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.errors import OpPlacementError
from vescale.plans import Plan


def out(function: Callable[..., Any], shape: tuple[int, ...] = (0,)) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        result = x.new_empty(shape)
        assert function(x, result) is result
        return result

    return run


def resized_to(shape: tuple[int, ...], rows: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        y = x[:rows].clone() if rows else x.new_empty(0)
        y.resize_(shape)
        return y.copy_(x)

    return run


def set_to(x: Any) -> Any:
    y, z = x.clone(), x * 3
    y.set_(z)
    z.mul_(2)  # one memory
    return y + z


def swapped(x: Any) -> Any:
    y, z = x.clone(), x * 3
    torch.utils.swap_tensors(y, z)
    return y.mul_(2) - z


EQUAL: dict[str, Callable[[Any], Any]] = {
    "mul": out(lambda x, y: torch.mul(x, 2, out=y)),
    "mm": out(lambda x, y: torch.mm(x, x.t(), out=y)),
    "cat": out(lambda x, y: torch.cat([x, x], out=y)),
    "sum": out(lambda x, y: torch.sum(x, 0, out=y)),
    "mul of its shape": out(lambda x, y: torch.mul(x, 2, out=y), (4, 6)),
    "sort": lambda x: torch.sort(x, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long)))[0],
    "resize_ of nothing": resized_to((4, 6), 0),
    "resize_ to its shape": resized_to((4, 6), 4),
    "set_": set_to,
    "swap_tensors": swapped,
    "is_set_to": lambda x: x * (1 + x.is_set_to(x)),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "resize_": lambda x: x.clone().resize_(2, 6),
    "resize_as_": lambda x: x[:2].clone().resize_as_(x),
    "as_strided_": lambda x: x.clone().as_strided_((2, 6), (6, 1)),
    "set_": lambda x: x.clone().set_(),
}


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def all_uses(placement: Placement) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    given: Any = parallelize(nn.Identity(), Plan(mesh).shard("<in>", placement))(x)
    for name, function in EQUAL.items():
        model: Any = parallelize(Apply(function), Plan(mesh).shard("<in>", placement))
        for found in (model(x), function(given)):
            expected = function(x.clone())
            assert found.shape == expected.shape, name
            torch.testing.assert_close(whole(found), expected, msg=lambda m, n=name: f"{n}: {m}")
    for name, function in REFUSED.items():
        model = parallelize(Apply(function), Plan(mesh).shard("<in>", placement))
        for use, argument in ((model, x), (function, given)):
            with pytest.raises(OpPlacementError, match=f"^{name} gives a tensor of shape"):
                use(argument)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_as_on_one_device(ranks: RankPools, placement: Placement) -> None:
    """The local tensor alone got the shape, or the memory; of parts one rank raised, and others waited for it."""
    ranks.run(all_uses, placement, world_size=2)
