"""Random ops on real DTensors on gloo ranks: the bits of one device, and its generator state on every rank."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as tensor_package
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import vescale.placements
from tests.device import device_type
from tests.examples import daily_sample
from tests.ranks import RankPools, run_cases
from tests.rng import cases
from tests.rng.dtensor_ops import CHEAP, FUNCTIONS, INITIALIZERS
from vescale import compat, rng
from vescale.compat import StridedShard, local_of, spec_of
from vescale.ops import PlacementFallbackWarning
from vescale.placements import InterleavedShard, RaggedShard, local_region

ALL: dict[str, Callable[[Tensor], Tensor]] = {**FUNCTIONS, **INITIALIZERS}


def expect_one_device(
    function: Callable[[Tensor], Any], source: Tensor, mesh: DeviceMesh, placements: list[Placement], waiting: bool
) -> None:
    """``function`` of a DTensor gives what ``function`` of the tensor gives, and leaves the same generator state."""

    def start() -> None:
        torch.manual_seed(7)
        if waiting:
            torch.randn(1)  # the second normal of the pair waits in the generator

    start()
    expected = function(source)
    state = torch.get_rng_state()
    start()
    result = function(distribute_tensor(source, mesh, placements, src_data_rank=None))
    left = torch.get_rng_state()
    if mesh.get_coordinate() is None:
        assert torch.equal(left, state), "generator state"
        return
    if isinstance(result, DTensor):
        spec, local, result = spec_of(result), local_of(result), result.full_tensor()
        if not any(p.is_partial() for p in spec.placements):
            region = local_region(tuple(spec.shape), spec.placements, tuple(mesh.shape), tuple(mesh.get_coordinate()))
            assert torch.equal(local, cases.part_of(expected, region)), "local values"
    assert torch.equal(left, state), "generator state"
    assert torch.equal(result, expected), "values"
    assert result.dtype == expected.dtype


def one_case(name: str, mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]) -> None:
    if name == "native_dropout mask" and device_type() != "cpu":
        # Of an odd number of elements the masks of a GPU are row-major, those of the simulated device, a CPU's, are not.
        shape = (shape[0] + shape[0] % 2, *shape[1:])
    torch.manual_seed(3)
    source = torch.randn(shape)
    mesh = init_device_mesh(device_type(), mesh_shape)
    expect_one_device(ALL[name], source, mesh, placements, waiting=len(name) % 2 == 1)


def run_all(cases_: list[tuple[Any, ...]]) -> int:
    rng.enable()
    try:
        return run_cases(one_case, cases_)
    finally:
        rng.disable()


def on_mesh(
    names: list[str], mesh: tuple[int, ...], lies: list[list[Placement]], shapes: list[tuple[int, ...]]
) -> list:
    return [(name, mesh, placements, shape) for name in names for placements in lies for shape in shapes]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_some_ops_on_any_number_of_ranks(ranks: RankPools, world_size: int) -> None:
    todo = on_mesh(CHEAP, (world_size,), [[Shard(0)], [Shard(1)]], [(7, 5)])
    assert ranks.run(run_all, todo, world_size=world_size) == [len(todo)] * world_size


def test_all_ops_on_four_ranks(ranks: RankPools) -> None:
    todo = on_mesh(list(ALL), (4,), [[Shard(0)], [Shard(1)]], [(18, 6)])
    assert ranks.run(run_all, todo, world_size=4) == [len(todo)] * 4


def test_all_ops_replicated_and_uneven(ranks: RankPools) -> None:
    todo = on_mesh(list(ALL), (4,), [[Replicate()]], [(5, 7)]) + on_mesh(list(FUNCTIONS), (4,), [[Shard(0)]], [(5, 7)])
    assert ranks.run(run_all, todo, world_size=4) == [len(todo)] * 4


def test_two_axes(ranks: RankPools) -> None:
    lies: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(1), Replicate()],
    ]
    names = [*CHEAP, "init.trunc_normal_ rejects", "init.orthogonal_ wide", "uniform_", "log_normal_"]
    todo = on_mesh(names, (2, 2), lies, [(9, 10)])
    assert ranks.run(run_all, todo, world_size=4) == [len(todo)] * 4


MESHES: dict[tuple[int, ...], list[list[Placement]]] = {
    (8,): [[RaggedShard((0, 1))], [InterleavedShard(0, 2)], [InterleavedShard(1, 3)], [Shard(0)]],
    (2, 4): [
        [RaggedShard(), Shard(1)],  # becomes a StridedRaggedShard where Shard(0) is
        [RaggedShard(), Shard(0)],
        [StridedShard(0, split_factor=4), Shard(0)],
        [InterleavedShard(0, 3), Shard(1)],
        [Replicate(), RaggedShard((0, 1))],
    ],
    (2, 2, 2): [
        [Shard(0), Shard(1), Shard(0)],
        [RaggedShard(), Replicate(), Shard(1)],
        [InterleavedShard(1, 2), Shard(0), Replicate()],
    ],
}
# One of each way through the handlers and the initializers, without ops that gather by themselves.
EVERYWHERE = [*CHEAP, "log_normal_", "random_.from", "rand_like", "randn_like dtype", "exponential_", "bernoulli.p"]
EVERYWHERE += ["normal Tensor Tensor", "alpha_dropout", "dropout2d", "multinomial 3", "poisson", "standard_gamma"]
EVERYWHERE += ["init.kaiming_uniform_", "init.trunc_normal_ rejects", "init.orthogonal_", "init.sparse_", "init.eye_"]


def combinations(mesh_shape: tuple[int, ...]) -> list[tuple[str, list[Placement], tuple[int, ...]]]:
    return daily_sample(itertools.product(EVERYWHERE, MESHES[mesh_shape], ((18, 6), (7, 5))), 3)


def every_placement(mesh_shape: tuple[int, ...]) -> int:
    """Each op on placements of the library, over meshes of one to three axes, on shapes even and uneven."""
    mesh = init_device_mesh(device_type(), mesh_shape)
    count = 0
    warnings.simplefilter("ignore", PlacementFallbackWarning)  # some ops around the random one gather
    rng.enable()
    try:
        for name, placements, shape in combinations(mesh_shape):
            torch.manual_seed(3)
            source = torch.randn(shape)
            torch.manual_seed(7)
            expected, state = ALL[name](source), torch.get_rng_state()
            torch.manual_seed(7)
            result: Any = ALL[name](vescale.placements.distribute_tensor(source, mesh, placements, src_data_rank=None))
            where = f"{name} {shape} on {mesh_shape} {placements}"
            assert torch.equal(torch.get_rng_state(), state), f"generator: {where}"
            whole = result.full_tensor() if isinstance(result, DTensor) else result
            assert torch.equal(whole, expected), f"values: {where}"
            count += 1
    finally:
        rng.disable()
    return count


@pytest.mark.parametrize("mesh_shape", list(MESHES))
def test_every_placement_on_eight_ranks(ranks: RankPools, mesh_shape: tuple[int, ...]) -> None:
    assert ranks.run(every_placement, mesh_shape, world_size=8) == [len(combinations(mesh_shape))] * 8
    assert sum(len(lies) for lies in MESHES.values()) * len(EVERYWHERE) * 2 > 500, "several hundred in all"


def ragged_tensors() -> int:
    """In-place and ``*_like`` ops on DTensors whose local tensors are runs of the flattened tensor."""
    mesh = init_device_mesh(device_type(), (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "uniform_": lambda x: x.uniform_(-1, 2),
        "normal_": lambda x: x.normal_(1, 2),
        "log_normal_": lambda x: x.log_normal_(),
        "bernoulli_.Tensor": lambda x: x.bernoulli_(torch.linspace(0, 1, 5)),
        "rand_like": torch.rand_like,
        "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
        "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, a=-1.0, b=1.0),
        "init.orthogonal_": lambda x: nn.init.orthogonal_(x),
        "init.sparse_": lambda x: nn.init.sparse_(x, 0.4),
    }
    lies: list[list[Placement]] = [
        [RaggedShard((0,), (1, 2)), Replicate()],
        [RaggedShard((0, 1), (2, 1)), Shard(0)],
        [Shard(1), RaggedShard((0, 1), (0, 3))],
        [RaggedShard(), Shard(1)],
    ]
    rng.enable()
    try:
        for name, function in functions.items():
            for placements in lies:
                torch.manual_seed(6)
                expected = function(torch.zeros(12, 5))
                state = torch.get_rng_state()
                torch.manual_seed(6)
                result = function(vescale.placements.distribute_tensor(torch.zeros(12, 5), mesh, placements))
                spec, coordinate = spec_of(result), mesh.get_coordinate()
                region = local_region((12, 5), spec.placements, tuple(mesh.shape), coordinate)
                assert torch.equal(local_of(result), cases.part_of(expected, region)), (name, placements)
                assert torch.equal(torch.get_rng_state(), state), (name, placements)
    finally:
        rng.disable()
    return len(functions) * len(lies)


def test_ragged_dtensors(ranks: RankPools) -> None:
    assert ranks.run(ragged_tensors) == [36] * 4


def outside_the_mesh() -> list[str]:
    """Every op on a mesh of two of four ranks: the other two run the same program and hold nothing."""
    rng.enable()
    refused = []
    try:
        mesh = DeviceMesh(device_type(), [1, 3])
        torch.manual_seed(3)
        source = torch.randn(6, 5)
        for name, function in ALL.items():
            try:
                expect_one_device(function, source, mesh, [Shard(0)], waiting=len(name) % 2 == 1)
            except RuntimeError as error:
                if name == "init.eye_" and "out parameter (cpu)" in str(error):
                    continue  # ranks outside have PyTorch's empty tensor of the CPU; the default device is another one
                assert "outside" in str(error), f"{name}: {error}"
                refused.append(name)
            except AssertionError as error:
                raise AssertionError(name) from error
    finally:
        rng.disable()
    return refused


def test_ranks_outside_the_mesh_advance_too(ranks: RankPools) -> None:
    refused = ranks.run(outside_the_mesh)
    assert refused[1] == refused[3] == []
    # What cannot be right on a rank without the values is an error there, not a guess.
    impossible = ["rrelu", "rrelu_", "poisson", "binomial", "standard_gamma", "bool(any)", "bool(all)", "int(argmax)"]
    assert refused[0] == refused[2] == impossible


def ops_that_nobody_covers() -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    rng.enable()
    try:
        sharded = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        partial = DTensor.from_local(torch.randn(4, 4), mesh, [Partial()])
        before = torch.get_rng_state()
        for function in (lambda x: x.normal_(), torch.bernoulli, torch.rand_like, nn.init.trunc_normal_):
            with pytest.raises(RuntimeError, match="terms of a pending sum cannot be drawn separately"):
                function(partial)
        with pytest.raises(RuntimeError, match="terms of a pending sum cannot be drawn separately"):
            torch.native_dropout(partial, 0.5, True)
        with pytest.raises(NotImplementedError, match="cannot reproduce the numbers of one device"):
            torch.bernoulli(sharded.sigmoid(), out=sharded)
        heads = distribute_tensor(torch.ones(2, 2, 3, 4), mesh, [Shard(1)])
        with pytest.raises(RuntimeError, match="fused kernels draw by local index"):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads, 0.5)
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        rng.disable()


def test_partial_and_unknown_ops_raise_and_draw_nothing(ranks: RankPools) -> None:
    ranks.run(ops_that_nobody_covers, world_size=2)


def generators_and_modes() -> None:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    rng.enable()
    try:
        own = {"generator": torch.Generator(device_type()).manual_seed(11)}
        for function in (
            lambda x, g: x.clone().normal_(generator=g),
            lambda x, g: torch.rand_like(x, generator=g) if torch.__version__ >= "2.12" else x,
            lambda x, g: nn.init.trunc_normal_(x.clone(), a=-1.0, b=1.0, generator=g),
            lambda x, g: torch.bernoulli(x.sigmoid(), generator=g),
            lambda x, g: torch.multinomial(x.sigmoid(), 2, generator=g),
            lambda x, g: torch.normal(x, 1.0, generator=g),
            lambda x, g: nn.init.kaiming_uniform_(x.clone(), generator=g),
            lambda x, g: nn.init.orthogonal_(x.clone(), generator=g),
        ):
            torch.manual_seed(1)
            source = torch.randn(5, 6)
            untouched = torch.get_rng_state()
            reference, mine = cases.clone_of(own["generator"]), cases.clone_of(own["generator"])
            expected = function(source, reference)
            result = function(distribute_tensor(source, mesh, [Shard(1)], src_data_rank=None), mine)
            assert torch.equal(result.full_tensor(), expected)
            assert torch.equal(reference.get_state(), mine.get_state())
            assert torch.equal(torch.get_rng_state(), untouched)
        with torch.inference_mode():  # composite ops reach the dispatcher whole
            expect_one_device(lambda x: F.dropout(x, 0.5), torch.randn(4, 6), mesh, [Shard(0)], waiting=False)
            expect_one_device(lambda x: x + bool((x > 0).any()), torch.ones(4, 6), mesh, [Shard(0)], waiting=False)
        module = nn.Dropout(0.25)
        torch.manual_seed(5)
        source = torch.randn(6, 4, requires_grad=True)
        (expected_out := module(source)).square().sum().backward()
        torch.manual_seed(5)
        torch.randn(6, 4)
        sharded = distribute_tensor(source.detach(), mesh, [Shard(0)]).requires_grad_()
        module(sharded).square().sum().backward()
        assert torch.equal(sharded.grad.full_tensor(), source.grad)
        assert not torch.equal(expected_out, source)
    finally:
        rng.disable()


def test_generators_inference_mode_and_backward(ranks: RankPools) -> None:
    ranks.run(generators_and_modes, world_size=4)


def factories() -> None:
    mesh = init_device_mesh(device_type(), (2, dist.get_world_size() // 2))
    # PyTorch's own draw for devices alone.
    refuses = pytest.raises(AssertionError) if device_type() == "cpu" else contextlib.nullcontext()
    with refuses:
        tensor_package.rand(3, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])
    before = torch.nn.init.orthogonal_
    rng.enable()
    rng.enable()
    try:
        for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
            for ours, plain in (
                (lambda **k: tensor_package.rand(9, 5, **k), lambda: torch.rand(9, 5)),
                (
                    lambda **k: tensor_package.randn((9, 5), dtype=torch.float64, **k),
                    lambda: torch.randn(9, 5).double(),
                ),
                (lambda **k: rng.rand(9, 5, dtype=torch.bfloat16, **k), lambda: torch.rand(9, 5, dtype=torch.bfloat16)),
                (lambda **k: rng.randn(9, 5, requires_grad=True, **k), lambda: torch.randn(9, 5)),
                (lambda **k: rng.randint(-3, 9, (9, 5), **k), lambda: torch.randint(-3, 9, (9, 5))),
                (lambda **k: tensor_package.ones(9, 5, **k), lambda: torch.ones(9, 5)),
            ):
                torch.manual_seed(2)
                expected = plain()
                state = torch.get_rng_state()
                torch.manual_seed(2)
                result = ours(device_mesh=mesh, placements=placements)
                if expected.dtype == torch.float64 or result.dtype == torch.float64:
                    torch.manual_seed(2)
                    expected = torch.randn(9, 5, dtype=torch.float64)
                    state = torch.get_rng_state()
                    torch.manual_seed(2)
                    result = ours(device_mesh=mesh, placements=placements)
                assert torch.equal(result.full_tensor(), expected)
                assert torch.equal(torch.get_rng_state(), state)
                assert result.dtype == expected.dtype
    finally:
        rng.disable()
        rng.disable()
    assert torch.nn.init.orthogonal_ is before and not rng.is_enabled()
    with refuses:
        tensor_package.rand(3, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])


def test_factories_and_enable_disable(ranks: RankPools) -> None:
    ranks.run(factories, world_size=4)


def what_stock_does() -> tuple[bool, bool]:
    compat.uninstall()  # what other tests have installed on this rank
    try:
        mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
        torch.manual_seed(0)
        filled = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]).normal_()
        same_shards = torch.equal(filled.full_tensor()[:2], filled.full_tensor()[2:])
        flag = distribute_tensor(torch.arange(4), mesh, [Shard(0)]) > 2
        return same_shards, bool(flag.any())
    finally:
        compat.install()


def test_the_problems_exist_in_stock_dtensor(ranks: RankPools) -> None:
    """When this goes red, PyTorch has fixed one: read its release notes and see what of ours may go. Since 2.14, ``bool`` of
    a pending result is that of the whole tensor."""
    is_fixed = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    # On the CPU: for devices DTensor keeps generators of its own.
    assert ranks.run(what_stock_does, world_size=2, device="cpu") == [(True, is_fixed), (True, True)]
