"""Transforms of ``torch.func``, and forward-mode differentiation: inside of a model they have one device's derivatives, or
raise TransformError where placements change; around a model they raise it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.comm import record_comms
from vescale.errors import TransformError
from vescale.fsdp import fully_shard
from vescale.plans import Plan

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WIDTH = 6


def square(x: Any) -> Any:
    return x * x.sin()


def with_vjp(x: Any, _: Any) -> Any:
    y, pull = torch.func.vjp(square, x)
    return y + pull(y)[0]  # beside DTensors, what the transform has wrapped is no plain tensor


# What a forward does with an intermediate tensor and a module.
INSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "vjp": with_vjp,
    "jvp": lambda x, _: torch.func.jvp(square, (x,), (x.cos(),))[1],
    "grad": lambda x, _: torch.func.grad(lambda z: square(z).sum())(x),
    "vmap": lambda x, _: torch.func.vmap(square)(x),
    "jacrev": lambda x, _: torch.func.jacrev(lambda z: square(z).sum(0))(x).sum(0),
    "grad of a module": lambda x, module: torch.func.grad(lambda z: module(z).square().sum())(x),
    "vmap of a module": lambda x, module: torch.func.vmap(module)(x),
    "functional_call": lambda x, module: torch.func.functional_call(
        module, {name: p * 2 for name, p in module.named_parameters()}, (x,)
    ),
}
OF_A_MODULE = ("grad of a module", "vmap of a module")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = Inner(), Inner(), kind

    def forward(self, x: Tensor) -> Tensor:
        return INSIDE[self.kind](self.first(x), self.second)


def plans(mesh: DeviceMesh) -> dict[str, Plan]:
    return {
        "nothing": Plan(mesh),
        "columns": Plan(mesh).shard("first.<out>", S1),
        "weights": Plan(mesh).shard("first.linear.(weight|bias)", S0).shard("second.linear.weight", S1),
        "rows": Plan(mesh).shard("<in>", S0),
        "a boundary": Plan(mesh).shard("second.<in>", S0),
    }


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    found = model(x)
    found.square().sum().backward()
    given = [found.detach(), x.grad, *(p.grad for p in model.parameters())]
    return [None if value is None else whole(value.detach()) for value in given]


def inside(kind: str) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, plan in plans(mesh).items():
        torch.manual_seed(0)
        one = Net(kind).double()
        many = copy.deepcopy(one)
        parallelize(many, plan)
        if kind in OF_A_MODULE and name == "a boundary":
            with pytest.raises(TransformError, match=r"torch\.func .* of second\.<in>: placements change here"):
                many(x)
            continue
        for expected, found in zip(step(one, x), step(many, x), strict=True):
            assert (expected is None) == (found is None), name
            if expected is not None and found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", INSIDE)
def test_inside_of_a_model(ranks: RankPools, kind: str) -> None:
    """``vjp`` was silent: its second call got zeros."""
    ranks.run(inside, kind, world_size=2)


def forward_mode(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent
        assert tangent is not None
        return tangent.detach()


AROUND: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "grad": lambda model, x: torch.func.grad(lambda z: model(z).square().sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "forward mode": forward_mode,
}


def around() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    model, one = Inner().double(), Inner().double()
    one.load_state_dict(model.state_dict())
    parallelize(model, Plan(mesh).shard("<in>", S0))
    sharded = [copy.deepcopy(one), copy.deepcopy(one)]
    for each in sharded:
        fully_shard(each, mesh=mesh)
    sharded[0](x).sum().backward()  # it has run before, the other one has not
    for kind, transform in AROUND.items():
        with pytest.raises(TransformError, match=r"of Inner, a parallelized model: .*create_graph=True"):
            transform(model, x)
        if kind == "forward mode":
            continue
        for each in sharded:
            with pytest.raises(TransformError, match="that fully_shard gathers"):
                transform(each, x)
    for each in sharded:  # its gathered parameters are plain tensors
        torch.testing.assert_close(forward_mode(each, x), forward_mode(one, x))
    for found in (whole(model(x).detach()), *(each(x).detach() for each in sharded)):  # nothing is left behind
        torch.testing.assert_close(found, one(x).detach())


def test_around_a_model(ranks: RankPools) -> None:
    ranks.run(around, world_size=2)


class Tangents(nn.Module):
    """Forward mode begins inside of the forward, in front of a boundary, or of a local region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(self.inner(forward_ad.make_dual(x, x.cos()))).tangent


def tangents_inside() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    one = Tangents().double()
    for wanted in (True, False):
        for plan, refused in (
            (Plan(mesh).shard("<in>", S0).shard("inner.<in>", R), r"inner\.<in>"),
            (Plan(mesh).shard("<in>", S0).local("inner", inputs=S0, outputs=S0), "local region inner"),
        ):
            model = copy.deepcopy(one)
            parallelize(model.requires_grad_(wanted), plan)
            with pytest.raises(TransformError, match=f"forward-mode differentiation of {refused}: "):
                model(x)


def test_tangents_inside_of_a_model(ranks: RankPools) -> None:
    ranks.run(tangents_inside, world_size=2)


def bits() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    parallelize(nn.Identity(), Plan(mesh))
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for placement in (S0, R):
        found = distribute_tensor(x, mesh, [placement], src_data_rank=None).view(torch.int64)
        assert torch.equal(whole(found), x.view(torch.int64))


def test_views_as_another_dtype(ranks: RankPools) -> None:
    """Of a sharded tensor: a TypeError about sizes."""
    ranks.run(bits, world_size=2)


def linearized() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    parallelize(nn.Identity(), Plan(mesh))
    primal = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    expected = torch.func.jvp(square, (primal,), (primal.cos(),))[1]
    for placements in ([S0], [S1], [R]):
        x = distribute_tensor(primal, mesh, placements, src_data_rank=None)
        with pytest.raises(TransformError, match=r"torch\.func\.linearize of a function of DTensors"):
            torch.func.linearize(square, x)
        with record_comms() as moved:
            tangent = torch.func.jvp(square, (x,), (x.cos(),))[1]
        assert not moved.records  # tangent and tensor are compared where they are
        torch.testing.assert_close(whole(tangent), expected)


def test_linearize_is_refused(ranks: RankPools) -> None:
    """Its trace took local tensors for constants: what it returned did not depend on the tangent."""
    ranks.run(linearized, world_size=2)
