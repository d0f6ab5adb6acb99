"""Local tensors that enter and leave a computation, in C++ and in Python: values, specs, gradients and what is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.compat import extend_dtensor, is_native, local_of, make_dtensor, make_spec, spec_of
from vescale.compat.native_dispatch import without_native
from vescale.ops import _observer, enter_local, leave_local, wrap_global
from vescale.ops._conversion import enter_together
from vescale.ops._observer import observe
from vescale.placements import contiguous_stride, own_region, without_partials

Placements = tuple[Placement, ...]
P, R, S0, S1 = Partial(), Replicate(), Shard(0), Shard(1)
SHAPE = (5, 6)


class Moves:
    """Notes implicit moves."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def running_module(self) -> str | None:
        return None

    def implicit_move(self, *move: Any) -> None:
        op, operand, local, source, target, _ = move
        self.seen.append((op, operand, tuple(local.shape), tuple(source), tuple(target)))


def held(mesh: DeviceMesh, placements: Placements, seed: int = 0) -> torch.Tensor:
    region = own_region(SHAPE, placements, mesh)
    assert region is not None
    generator = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
    return torch.rand(region.local_shape, generator=generator)


def dtensor(mesh: DeviceMesh, placements: Placements, seed: int = 0) -> DTensor:
    local = held(mesh, placements, seed)
    return make_dtensor(local, make_spec(mesh, placements, SHAPE, contiguous_stride(SHAPE), local.dtype))


def facts(x: torch.Tensor | None) -> Any:
    if x is None:
        return None
    if isinstance(x, DTensor):
        return type(x), spec_of(x), x.requires_grad, x.is_leaf, facts(local_of(x))
    return type(x), tuple(x.shape), x.stride(), x.dtype, x.requires_grad, x.is_leaf, x.tolist()


def observed(call: Callable[[], Any], leaves: list[torch.Tensor], is_observed: bool) -> list[Any]:
    """What ``call`` gives, with its gradients, gradients of gradients, and what was reported."""
    moves, found = Moves(), []
    before = list(_observer._OBSERVERS)
    observe(moves)
    try:
        _observe_gradients(call, leaves, found)
    finally:
        _observer._OBSERVERS[:] = before
    if is_observed:
        with record_comms() as ledger:
            call()
        found.append([(r.op, r.bytes, r.requester) for r in ledger.records])
    return [*found, moves.seen]


def _observe_gradients(call: Callable[[], Any], leaves: list[torch.Tensor], found: list[Any]) -> None:
    for twice in (False, True):
        made = call()
        found += [facts(x) for x in made]
        outputs = [x for x in made if x.requires_grad]
        weights = [torch.cos(local_of(x) if isinstance(x, DTensor) else x).detach() for x in outputs]
        gradients = [make_dtensor(w, spec_of(x)) if isinstance(x, DTensor) else w for w, x in zip(weights, outputs)]
        first = torch.autograd.grad([x * x for x in outputs], leaves, gradients, create_graph=twice, allow_unused=True)
        found += [facts(x) for x in first]
        if twice:
            used = [x for x in first if x is not None and x.requires_grad]
            ones = [torch.ones_like(x) for x in used]
            found += [facts(x) for x in torch.autograd.grad(used, leaves, ones, allow_unused=True)]


def equal_pythons(
    meshes: dict[Any, DeviceMesh], name: str, shape: tuple[int, ...], placements: Placements, grads: Placements | None
) -> None:
    mesh = meshes[shape]
    leaves: list[torch.Tensor]
    if name in ("enter", "always"):
        leaves = [dtensor(mesh, placements).requires_grad_()]
        call = lambda: [enter_local(leaves[0] * 2, grads, always=name == "always")]  # noqa: E731
    elif name == "together":
        leaves = [
            dtensor(mesh, placements).requires_grad_(),
            dtensor(mesh, placements, 1),
            dtensor(mesh, placements, 2),
        ]
        leaves[2].requires_grad_()
        wanted = grads or without_partials(placements)
        fixed, whole = leaves[1], make_dtensor(held(mesh, placements).long(), spec_of(leaves[1]))
        leaves = [leaves[0], leaves[2]]
        operands = (leaves[0], fixed, leaves[1], whole)
        call = lambda: [*enter_together(operands, (wanted,) * 4)]  # noqa: E731
    elif name == "leave":
        leaves = [held(mesh, placements).t().contiguous().t().requires_grad_()]
        call = lambda: [leave_local(leaves[0] * 2, mesh, placements, SHAPE, "an op", grads)]  # noqa: E731
    else:
        generator = torch.Generator().manual_seed(3)
        leaves = [torch.rand(SHAPE[::-1], generator=generator).t().requires_grad_()]
        call = lambda: [wrap_global(leaves[0] * 2, mesh, placements, "here")]  # noqa: E731
    with without_native():
        expected = observed(call, leaves, True)
        with torch.no_grad():
            expected += [facts(x) for x in call()]
    for _ in range(2):  # asked once, then looked up
        found = observed(call, leaves, True)
        with torch.no_grad():
            found += [facts(x) for x in call()]
        assert found == expected
    assert call()[0].grad_fn.name() in ("EnterLocalBackward", "LeaveLocalBackward", "WrapGlobalBackward")


CASES = [
    (name, shape, placements, grads)
    for name in ("enter", "always", "together", "leave", "wrap")
    for shape, placements, grads in (
        ((2,), (R,), None),
        ((2,), (R,), (P,)),
        ((2,), (S0,), None),
        ((2,), (S1,), None),
        ((2,), (P,), None),
        ((2,), (P,), (R,)),
        ((1, 2), (P, S1), (R, S1)),
        ((2, 1), (S0, S0), None),
    )
]


def in_every_way(cases: list[Any]) -> int:
    extend_dtensor()
    assert is_native()
    meshes = {shape: init_device_mesh(device_type(), shape) for _, shape, *_ in cases}
    return run_cases(functools.partial(equal_pythons, meshes), cases)


@pytest.mark.helper("dispatch")
def test_regions_equal_pythons(ranks: RankPools) -> None:
    assert set(ranks.run(in_every_way, CASES, world_size=2)) == {len(CASES)}
