"""Composite ops that run as one kernel give what PyTorch makes of their parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from tests.compat.test_native_dispatch import Outcome, assert_same, made, world
from tests.examples import NIGHTLY
from vescale.comm import record_comms
from vescale.compat import clear_sharding_caches, dispatch_counts, extend_dtensor, reset_dispatch_counts
from vescale.compat.native_dispatch import without_native

__all__ = ["world"]  # a fixture

pytestmark = pytest.mark.helper("dispatch")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    extend_dtensor()


PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())


def leaves_of(shapes: tuple[Any, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[DTensor]:
    made_ = [
        made(s, mesh, (Replicate(),) * (mesh.ndim - 1) + (p,), 0, i) for i, (s, p) in enumerate(zip(shapes, placements))
    ]
    return [x.requires_grad_() for x in made_]


def outcome(function: Callable[..., Any], leaves: list[DTensor]) -> Outcome:
    """Values, and first and second derivatives."""
    try:
        result = function(*leaves)
        weight = torch.full_like(result, 0.5).requires_grad_()
        wanted = [x for x in leaves if x.requires_grad]
        first = torch.autograd.grad(result, wanted, weight, retain_graph=True)
        recorded = torch.autograd.grad(result, wanted, weight, create_graph=True)
        with_graph = [x for x in recorded if x.requires_grad]
        second = torch.autograd.grad(
            with_graph, [*wanted, weight], [torch.ones_like(x) for x in with_graph], allow_unused=True
        )
    except RuntimeError as error:
        return Outcome(f"{type(error).__name__}: {str(error)[:80]}", [], [], [])
    return Outcome("", [result, *recorded], [*first, *second], [])


def linear_cases() -> list[tuple[str, tuple[Any, ...], Callable[..., Any]]]:
    last = [(rows + (12,)) for rows in ((8,), (7,), (1,), (2, 4), (3, 5), (2, 1, 3))]
    cases: list[tuple[str, tuple[Any, ...], Callable[..., Any]]] = []
    for shape in last:
        cases.append((f"{shape}", (shape, (16, 12)), F.linear))
        cases.append((f"{shape} and bias", (shape, (16, 12), (16,)), F.linear))
    cases += [
        ("transposed input", ((12, 8), (16, 12)), lambda x, w: F.linear(x.t(), w)),
        ("transposed input and bias", ((4, 12, 8), (16, 12), (16,)), lambda x, w, b: F.linear(x.mT, w, b)),
        ("transposed weight", ((2, 4, 12), (12, 16)), lambda x, w: F.linear(x, w.t())),
        ("frozen weight", ((2, 4, 12), (16, 12)), lambda x, w: F.linear(x, w.detach())),
        ("frozen input", ((2, 4, 12), (16, 12), (16,)), lambda x, w, b: F.linear(x.detach(), w, b)),
        ("one feature", ((2, 4, 1), (16, 1)), F.linear),
        ("one result", ((2, 4, 12), (1, 12), (1,)), F.linear),
        ("vector", ((12,), (16, 12)), F.linear),
        ("wrong sizes", ((2, 4, 12), (16, 8)), F.linear),
    ]
    return cases


def matmul_cases() -> list[tuple[str, tuple[Any, ...], Callable[..., Any]]]:
    return [
        ("matrices", ((4, 2, 3, 5), (4, 2, 5, 6)), torch.matmul),
        ("two dims of batches", ((4, 2, 3, 3, 5), (4, 2, 3, 5, 6)), torch.matmul),
        ("uneven", ((3, 5, 3, 5), (3, 5, 5, 6)), torch.matmul),
        ("transposed factor", ((4, 2, 3, 5), (4, 2, 6, 5)), lambda x, y: x @ y.mT),
        ("swapped batch dims", ((4, 2, 3, 5), (4, 2, 6, 5)), lambda x, y: x.transpose(0, 1) @ y.permute(1, 0, 3, 2)),
        ("frozen factor", ((4, 2, 3, 5), (4, 2, 5, 6)), lambda x, y: x @ y.detach()),
        ("vectors as matrices", ((4, 2, 1, 5), (4, 2, 5, 1)), torch.matmul),
        ("one factor for all", ((4, 2, 3, 5), (1, 2, 5, 6)), torch.matmul),
        ("one matrix for all", ((4, 2, 3, 5), (5, 6)), torch.matmul),
        ("wrong sizes", ((4, 2, 3, 5), (4, 2, 6, 5)), torch.matmul),
    ]


def norm_cases(
    norm: Callable[..., torch.Tensor], num_factors: int
) -> list[tuple[str, tuple[Any, ...], Callable[..., Any]]]:
    factors = ((12,),) * num_factors
    return [
        ("matrix", ((8, 12), *factors), lambda x, *f: norm(x, (12,), *f)),
        ("three dims", ((2, 5, 12), *factors), lambda x, *f: norm(x, (12,), *f, eps=1e-3)),
        ("no factors", ((4, 3, 12),), lambda x: norm(x, (12,))),
        ("two dims at once", ((4, 2, 3), *((2, 3),) * num_factors), lambda x, *f: norm(x, (2, 3), *f)),
        ("one weight", ((4, 3, 12), (12,)), lambda x, w: norm(x, (12,), w)),
        ("transposed input", ((12, 8), *factors), lambda x, *f: norm(x.t(), (12,), *f)),
        ("frozen input", ((8, 12), *factors), lambda x, *f: norm(x.detach(), (12,), *f)),
        ("frozen weight", ((8, 12), (12,)), lambda x, w: norm(x, (12,), w.detach())),
        ("wrong sizes", ((8, 12), *factors), lambda x, *f: norm(x, (8,), *f)),
    ]


CASES: dict[str, Callable[[], list[tuple[str, tuple[Any, ...], Callable[..., Any]]]]] = {
    "linear": linear_cases,
    "matmul": matmul_cases,
    "layer_norm": lambda: norm_cases(F.layer_norm, 2),
    "rms_norm": lambda: [
        *norm_cases(F.rms_norm, 1),
        ("bfloat16", ((8, 12), (12,)), lambda x, w: F.rms_norm(x.bfloat16(), (12,), w.bfloat16())),
        ("double", ((8, 12), (12,)), lambda x, w: F.rms_norm(x.double(), (12,), w.double())),
        ("two types", ((8, 12), (12,)), lambda x, w: F.rms_norm(x, (12,), w.double())),
    ],
}


@pytest.mark.parametrize("mesh_name", ["1-D", "2-D"])
@pytest.mark.parametrize("composite", CASES)
def test_composites_equal_their_parts(world: dict[str, DeviceMesh], composite: str, mesh_name: str) -> None:
    mesh, num_local, drawn = world[mesh_name], 0, random.Random(mesh_name)
    for name, shapes, function in CASES[composite]():
        for placements in itertools.product(PLACEMENTS, PLACEMENTS):
            if not NIGHTLY and drawn.random() > (0.3 if mesh.ndim == 1 else 0.04):
                continue
            chosen = (*placements, placements[1] if placements[1].is_shard(0) else Replicate())[: len(shapes)]
            with without_native(), record_comms() as ledger:
                expected = outcome(function, leaves_of(shapes, mesh, chosen))
            for _ in range(2):
                reset_dispatch_counts()
                found = outcome(function, leaves_of(shapes, mesh, chosen))
                counts = dispatch_counts()
                num_local += counts.get(f"{composite}_backward", (0,))[0]
                # What fake groups gather is not defined.
                is_defined = not ledger.records and not any(stock for _, _, _, stock in counts.values())
                try:
                    assert_same(found, expected, is_defined)
                except AssertionError as error:
                    raise AssertionError(f"{name} on {chosen}: {error}") from error
    assert num_local > (30 if NIGHTLY else 0)


def test_linear_saves_the_same_on_each_call(world: dict[str, DeviceMesh]) -> None:
    """Checkpointing compares what the forward and its repetition save: here a call that is decided, and a known one."""
    x, w = leaves_of(((2, 4, 12), (16, 12)), world["1-D"], (Replicate(), Shard(0)))
    clear_sharding_caches()
    gradient = torch.autograd.grad(checkpoint(F.linear, x, w, use_reentrant=False).sum(), w)[0]
    expected = torch.autograd.grad(F.linear(x, w).sum(), w)[0]
    assert torch.equal(gradient.to_local(), expected.to_local())

    saved: list[Any] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(x, w)
    assert [type(t) for t in saved] == [DTensor, DTensor] and saved[0] is x and saved[1] is w


@pytest.mark.parametrize("mesh_name", ["1-D", "2-D"])
@pytest.mark.parametrize("shape", [(8, 12), (2, 4, 12)])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_linear_takes_its_part_of_a_whole_bias(
    world: dict[str, DeviceMesh], mesh_name: str, shape: tuple[int, ...], cut: str
) -> None:
    """A layer of which each rank has a term of the sum, or some features, and the bias that every rank has: one op."""
    of_input, of_weight = (Shard(len(shape) - 1), Shard(1)) if cut == "rows" else (Replicate(), Shard(0))

    def run() -> tuple[DTensor, torch.Tensor]:
        x, w, b = leaves_of((shape, (16, 12), (16,)), world[mesh_name], (of_input, of_weight, Replicate()))
        y: Any = F.linear(x, w, b)
        return y, torch.autograd.grad(y, b, torch.ones_like(y))[0]

    with without_native():
        expected = run()
    run()
    reset_dispatch_counts()
    found = run()
    assert dispatch_counts()["linear"][:2] == (1, 0)
    assert_same(Outcome("", list(found), [], []), Outcome("", list(expected), [], []), True)


def test_linear_refuses_changed_and_freed_operands(world: dict[str, DeviceMesh]) -> None:
    x, w = leaves_of(((2, 4, 12), (16, 12)), world["1-D"], (Replicate(), Shard(0)))
    result = F.linear(x, w)
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    result = F.linear(x, w)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.sum().backward()


def test_results_that_autograd_saves_are_made_in_cpp(world: dict[str, DeviceMesh]) -> None:
    """Saving the result of an op, as rsqrt does, detaches it, also where nobody has called detach."""
    (x,) = leaves_of(((8, 12),), world["1-D"], (Shard(0),))
    x = x * 1.0
    y = torch.rsqrt(x)
    copy = y.data
    assert type(copy) is DTensor and copy._spec == y._spec and not copy.requires_grad and copy._version == 0
    copy.mul_(2.0)
    assert torch.equal(copy.to_local(), y.detach().to_local())  # one memory
    assert y._version == 0
    with torch.no_grad():
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert copy._local_tensor is not y._local_tensor


def in_leaves(world: dict[str, DeviceMesh], how: str) -> tuple[list[torch.Tensor], int]:
    """Gradients of a weight and a bias after backwards, and how many ops on DTensors autograd called to accumulate them."""
    mesh = world["1-D"]
    x, w, b = leaves_of(((4, 12), (12, 12), (12,)), mesh, (Shard(0), Replicate(), Replicate()))
    seen: list[torch.Tensor] = []
    if how == "hook":
        w.register_hook(lambda grad: 2 * grad)
    elif how == "hook after accumulation":
        w.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.to_local().clone()))
    out = F.linear(
        F.linear(x.detach(), w, b), w if how == "used twice" else w.detach(), b if how == "used twice" else None
    )
    reset_dispatch_counts()
    for _ in range(2 if how == "on top" else 1):
        out.sum().backward(retain_graph=how == "on top")
    num_detached = dispatch_counts().get("detach", (0,))[0]
    grads = [w.grad, b.grad]
    assert len({grad.to_local().untyped_storage().data_ptr() for grad in grads}) == 2
    return [*grads, *seen], num_detached


@pytest.mark.parametrize("how", ["once", "on top", "used twice", "hook", "hook after accumulation"])
def test_gradients_of_leaves(world: dict[str, DeviceMesh], how: str) -> None:
    """They become ``grad`` as they are where autograd would do nothing else with them."""
    with without_native():
        expected, _ = in_leaves(world, how)
    found, num_detached = in_leaves(world, how)
    assert_same(Outcome("", found, [], []), Outcome("", expected, [], []), True)
    assert num_detached == 0 or how != "once"
