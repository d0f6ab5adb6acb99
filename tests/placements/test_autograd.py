"""Gradients through from_local, redistribute, to_local and full_tensor equal those of one device."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as stock_distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from tests.placements import oracle
from tests.placements.on_ranks import Source, local, make_mesh, sample
from tests.placements.specs import draw_placements, draw_shape
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.compat import AsyncCollectiveTensor
from vescale.placements import InterleavedShard, RaggedShard, from_local, has_custom, redistribute, to_local

UNEVEN = RaggedShard((0,), (2, 0, 5, 1))


def gradient_placements(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def gradients_of(mesh_ranks: Any, shape: tuple[int, ...], source: Any, target: Any, async_op: bool, seed: int) -> None:
    """``y = x ** 3``, elementwise on the moved tensor, so that first and second derivatives know the values."""
    mesh = make_mesh(mesh_ranks)
    tensor = Source(mesh, shape, source, torch.float64, seed)
    leaf = tensor.local.clone().requires_grad_()
    stride = torch.empty(shape, device="meta").stride()
    placed = from_local(leaf, mesh, source, shape=shape, stride=stride)
    moved = redistribute(placed, placements=target, async_op=async_op)
    there = to_local(moved)
    weight, direction = sample(shape, torch.float64, seed + 1), sample(shape, torch.float64, seed + 2)
    # The local loss is written with the logical values at this rank's elements; pending values are not them.
    everything = tensor.logical
    elementwise = not any(p.is_partial() for p in moved.placements)
    own_weight = tensor.expected(gradient_placements(moved.placements), weight)
    loss = (there**3 * own_weight).sum() if elementwise else (there * own_weight).sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=elementwise)
    back = gradient_placements(placed.placements)
    context = f"{shape} {source} -> {target}"
    expected = 3 * everything**2 * weight if elementwise else weight
    torch.testing.assert_close(grad, tensor.expected(back, expected), msg=lambda m: f"{context}: {m}")
    if not elementwise:
        return
    (second,) = torch.autograd.grad((grad * tensor.expected(back, direction)).sum(), leaf)
    expected = 6 * everything * weight * direction
    torch.testing.assert_close(second, tensor.expected(back, expected), msg=lambda m: f"{context}, twice: {m}")


def random_gradients(mesh_ranks: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    mesh_shape = tuple(torch.tensor(mesh_ranks).shape)
    cases: list[tuple[Any, ...]] = []
    while len(cases) < count:
        shape = draw_shape(rng, max_numel=80)
        op = rng.choice(("sum", "avg"))
        source = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.5 else ())
        target = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.2 else ())
        if shape and has_custom(source) and has_custom(target):
            cases.append((mesh_ranks, shape, source, target, rng.random() < 0.5, len(cases)))
    return run_cases(gradients_of, cases)


@pytest.mark.parametrize("mesh_ranks", [(0, 1, 2), (2, 0, 3, 1), ((0, 1), (2, 3)), (((0, 1),), ((2, 3),))], ids=str)
def test_random_pairs(ranks: RankPools, mesh_ranks: Any) -> None:
    ranks.run(random_gradients, mesh_ranks, 5, 50, world_size=torch.tensor(mesh_ranks).numel())


def like_stock(seed: int) -> None:
    """InterleavedShard(dim, 1) is Shard(dim): everything equals stock DTensor, also what the dtype arguments do."""
    mesh = make_mesh((0, 1, 2, 3))
    whole = sample((8, 6), torch.float32, seed) / 3
    for before, after in (
        (Shard(0), Shard(1)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Partial(), Shard(0)),
        (Partial("avg"), Shard(0)),
        (Partial("avg"), Replicate()),
    ):
        for options in (
            {},
            {"forward_dtype": torch.bfloat16},
            {"backward_dtype": torch.bfloat16},
            {"forward_dtype": torch.float64, "backward_dtype": torch.float16},
            {"async_op": True},
        ):
            results = []
            for ours in (False, True):

                def named(placement: Any, ours: bool = ours) -> Any:
                    return InterleavedShard(placement.dim, 1) if ours and isinstance(placement, Shard) else placement

                source, target = named(before), named(after)
                if ours and not has_custom((source, target)):
                    target = RaggedShard()  # a flat Replicate -> compare through full_tensor below
                part = whole if not isinstance(before, Shard) else whole.chunk(4, before.dim)[dist.get_rank()]
                if before.is_partial():
                    part = part * (dist.get_rank() + 1)
                leaf = part.clone().requires_grad_()
                placed = from_local(leaf, mesh, (source,), shape=(8, 6), stride=(6, 1))
                moved = placed.redistribute(placements=(target,), **options)
                full = moved.full_tensor()
                (full.float() ** 2).sum().backward()
                results.append((full.dtype, full.detach(), leaf.grad))
            stock, own = results
            assert stock[0] == own[0] and stock[2].dtype == own[2].dtype
            exact = not any("dtype" in name for name in options) and not before.is_partial()
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-2, "atol": 1e-2}
            torch.testing.assert_close(own[1], stock[1], **tolerance)
            torch.testing.assert_close(own[2], stock[2], **tolerance)


def test_like_stock(ranks: RankPools) -> None:
    ranks.run(like_stock, 3, world_size=4)


def dtype_arguments() -> None:
    """forward_dtype and backward_dtype decide what is communicated, and the bytes say so."""
    mesh = make_mesh((0, 1, 2, 3))
    tensor = Source(mesh, (8, 3), (UNEVEN,), torch.float32, seed=1)
    values = (tensor.local / 3).requires_grad_()
    placed = from_local(values, mesh, (UNEVEN,), shape=(8, 3))
    missing = 24 - values.numel()
    with record_comms() as ledger:
        moved = redistribute(
            placed, placements=(Replicate(),), forward_dtype=torch.bfloat16, backward_dtype=torch.float16
        )
    assert moved.dtype == torch.bfloat16 and local(moved).dtype == torch.bfloat16 and ledger.bytes() == missing * 2
    assert torch.equal(local(moved), (tensor.logical / 3).bfloat16())
    weight = sample((8, 3), torch.float32, 2) / 7
    with record_comms() as ledger:
        gradient = from_local(weight.bfloat16(), mesh, (Partial(),), shape=(8, 3), stride=(3, 1))
        moved.backward(gradient)
    assert values.grad is not None and values.grad.dtype == torch.float32
    expected = 4 * weight.bfloat16().half().float()
    torch.testing.assert_close(values.grad, tensor.expected((UNEVEN,), expected), rtol=1e-3, atol=1e-3)
    assert ledger.count("reduce_scatter_v") == ledger.count() == 1
    assert ledger.bytes() == missing * 2
    # backward_dtype alone: forward in float32, the gradient in bfloat16, rounded before it is added up.
    leaf = placed.detach().requires_grad_()
    with record_comms() as ledger:
        moved = redistribute(leaf, placements=(Replicate(),), backward_dtype=torch.bfloat16)
    assert moved.dtype == torch.float32 and ledger.bytes() == missing * 4
    with record_comms() as ledger:
        moved.backward(from_local(weight, mesh, (Partial(),), shape=(8, 3), stride=(3, 1)))
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32 and ledger.bytes() == missing * 2
    expected = (4 * weight.bfloat16().float()).bfloat16().float()
    assert torch.equal(local(leaf.grad), tensor.expected((UNEVEN,), expected))


def test_dtype_arguments(ranks: RankPools) -> None:
    ranks.run(dtype_arguments, world_size=4)


def partial_gradients() -> None:
    """grad_placements=Partial: every rank's loss sees its own weights; the gradient is their sum, reduce-scattered."""
    mesh = make_mesh((0, 1, 2, 3))
    rank = dist.get_rank()
    weights = [sample((8, 3), torch.float64, seed) for seed in range(4)]
    for placement in (UNEVEN, InterleavedShard(0, 2), RaggedShard()):
        tensor = Source(mesh, (8, 3), (placement,), torch.float64, seed=1)
        for through_full in (False, True):
            leaf = tensor.local.clone().requires_grad_()
            placed = from_local(leaf, mesh, (placement,), shape=(8, 3))
            if through_full:
                whole = placed.full_tensor(grad_placements=[Partial()])
            else:
                whole = placed.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            with record_comms() as ledger:
                (whole * weights[rank]).sum().backward()
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, tensor.expected(placed.placements, sum(weights)))
            assert [r.op for r in ledger.records] == ["reduce_scatter_v"]
    # The gradient of a pending tensor is whole on every rank, as in stock DTensor: gathered once, never pending.
    pending = Source(mesh, (8, 3), (Partial(),), torch.float64, seed=1).dtensor().detach().requires_grad_()
    moved = redistribute(pending, placements=(UNEVEN,))
    with record_comms() as ledger:
        moved.backward(from_local(tensor.expected((UNEVEN,), weights[0]), mesh, (UNEVEN,), shape=(8, 3)))
    assert pending.grad is not None and pending.grad.placements == (Replicate(),)
    assert torch.equal(local(pending.grad), weights[0]) and ledger.count("all_gather_v") == ledger.count() == 1
    # Left pending by from_local: each rank gets its own contribution.
    leaf = torch.ones(8, 3, dtype=torch.float64, requires_grad=True)
    placed = from_local(leaf, mesh, [Replicate()], shape=(8, 3), stride=(3, 1), grad_placements=[Partial()])
    whole = placed.redistribute(placements=[UNEVEN]).full_tensor()
    whole.backward(weights[0])
    assert leaf.grad is not None
    total = leaf.grad.clone()
    dist.all_reduce(total)
    assert torch.equal(total, weights[0])
    # On two axes the ragged one stays, the other is pending.
    grid = make_mesh(((0, 1), (2, 3)))
    placements = (RaggedShard((0,), (3, 1)), Replicate())
    tensor = Source(grid, (8, 3), placements, torch.float64, seed=1)
    leaf = tensor.local.clone().requires_grad_()
    placed = from_local(leaf, grid, placements, shape=(8, 3))
    part = to_local(placed, grad_placements=(placements[0], Partial()))
    column = grid.get_coordinate()[1]
    (part * tensor.expected(placements, weights[column])).sum().backward()
    assert torch.equal(leaf.grad, tensor.expected(placements, weights[0] + weights[1]))
    explicit = from_local(
        tensor.local.clone().requires_grad_(), grid, placements, shape=(8, 3), grad_placements=placements
    )
    assert explicit.placements == placements


def test_partial_gradients(ranks: RankPools) -> None:
    ranks.run(partial_gradients, world_size=4)


def parameters_and_graphs() -> None:
    mesh = make_mesh((0, 1, 2, 3))
    tensor = Source(mesh, (8, 3), (UNEVEN,), torch.float32, seed=1)
    parameter = torch.nn.Parameter(tensor.dtensor())
    assert isinstance(parameter.to_local(), torch.nn.Parameter)
    with torch.no_grad():
        inside = parameter.to_local()
        assert isinstance(inside, torch.nn.Parameter) and type(parameter._local_tensor) is torch.Tensor
        assert parameter.detach().requires_grad is False
    unused = from_local(tensor.local.clone().requires_grad_(), mesh, (UNEVEN,), shape=(8, 3))
    assert unused.requires_grad and unused.grad_fn is not None
    moved = redistribute(unused, placements=(Replicate(),))
    assert moved.requires_grad and moved.grad_fn is not None
    with torch.no_grad():
        assert not redistribute(unused, placements=(Replicate(),)).requires_grad
    same = redistribute(unused, placements=(UNEVEN,))
    assert same.grad_fn is not None
    same.to_local().sum().backward()


def test_parameters_and_graphs(ranks: RankPools) -> None:
    ranks.run(parameters_and_graphs, world_size=4)


def in_flight(tensor: torch.Tensor) -> bool:
    """Whether nobody has waited for the collective yet."""
    return tensor.elem.untyped_storage()._vescale_work._pending is not None


TARGETS = (
    Replicate(),  # in place, by broadcasts or all-to-all
    RaggedShard((0, 1), (1, 20, 0, 3)),
    InterleavedShard(1, 2),  # unpacked after the collective
    Shard(0),
    RaggedShard((0,), (1, 1, 1, 1)),
)


def asynchronous() -> None:
    mesh = make_mesh((0, 1, 2, 3))
    for source in ((UNEVEN,), (Partial(),), (InterleavedShard(0, 2),)):
        tensor = Source(mesh, (8, 3), source, torch.float64, seed=4)
        for target in TARGETS:
            if not has_custom((*source, target)):
                continue
            expected = tensor.expected((target,))

            def start(tensor: Source = tensor, target: Any = target) -> DTensor:
                moved = redistribute(tensor.dtensor(), placements=(target,), async_op=True)
                assert isinstance(local(moved), AsyncCollectiveTensor)
                assert local(moved).shape == tensor.expected((target,)).shape
                return moved

            moved = start()
            assert in_flight(local(moved))
            assert torch.equal(local(moved) * 2, expected * 2), "an op waits"
            lazy = local(moved)
            assert not in_flight(lazy) and torch.equal(lazy.wait(), expected), "waiting twice is fine"

            part = to_local(start())
            if target is TARGETS[0]:  # seconds on a heap with all of torch in it
                gc.collect()
            assert isinstance(part, AsyncCollectiveTensor) and in_flight(part), "to_local does not wait"
            assert torch.equal(part + 0, expected), "the work lives as long as the memory"

            view = to_local(start()).view(-1)[:1].clone()
            assert torch.equal(view, expected.reshape(-1)[:1])

            first, second = start(), start()
            assert torch.equal(local(second) + 0, expected) and torch.equal(local(first) + 0, expected)

            again = redistribute(
                redistribute(start(), placements=source if source != (Partial(),) else (UNEVEN,)), placements=(target,)
            )
            assert torch.equal(local(again), expected), "a result in flight is the next one's source"
            chain = redistribute(start(), placements=(RaggedShard((0,), (0, 0, 8, 0)),), async_op=True)
            assert torch.equal(chain.full_tensor(), tensor.logical)
            if has_custom((*moved.placements,)):
                assert torch.equal(start().full_tensor(), tensor.logical)


def test_async_op(ranks: RankPools) -> None:
    ranks.run(asynchronous, world_size=4)


def dropped() -> None:
    """Results that nobody uses: the ranks stay in step, and their memory is given back."""
    import weakref

    mesh = make_mesh((0, 1, 2, 3))
    tensor = Source(mesh, (8, 3), (UNEVEN,), torch.float64, seed=4)
    storages = []
    for index in range(60):
        moved = redistribute(tensor.dtensor(), placements=(TARGETS[index % 5],), async_op=True)
        storages.append(weakref.ref(local(moved).elem.untyped_storage()))
        del moved
    gc.collect()
    dist.barrier()
    last = redistribute(tensor.dtensor(), placements=(Replicate(),), async_op=True)
    gc.collect()
    assert sum(ref() is not None for ref in storages) <= 16, "the last few may be kept"
    assert torch.equal(local(last) + 0, tensor.logical)


def test_dropped_results(ranks: RankPools) -> None:
    ranks.run(dropped, world_size=4)


def async_gradients() -> None:
    """async_op also holds for the backward redistribution: the gradient arrives in flight and is right."""
    mesh = make_mesh((0, 1, 2, 3))
    tensor = Source(mesh, (8, 3), (UNEVEN,), torch.float64, seed=4)
    weight = sample((8, 3), torch.float64, 7)
    for placement in TARGETS:
        leaf = tensor.dtensor().detach().requires_grad_()
        moved = redistribute(leaf, placements=(placement,), async_op=True)
        part = to_local(moved)
        (part * tensor.expected((placement,), weight)).sum().backward()
        assert leaf.grad is not None and leaf.grad.placements == (UNEVEN,)
        assert torch.equal(local(leaf.grad) + 0, tensor.expected((UNEVEN,), weight))


def test_async_gradients(ranks: RankPools) -> None:
    ranks.run(async_gradients, world_size=4)


def mixed_entry_points() -> None:
    """``torch.distributed.tensor``'s own names reach our code, and leave stock tensors to stock code."""
    mesh = make_mesh((0, 1, 2, 3))
    whole = sample((8, 3), torch.float32, 1)
    placed = torch.distributed.tensor.distribute_tensor(whole, mesh, [UNEVEN])
    assert placed.placements == (UNEVEN,) and torch.equal(placed.full_tensor(), whole)
    with mesh:
        assert torch.equal(torch.distributed.tensor.distribute_tensor(whole, None, [UNEVEN]).full_tensor(), whole)
        part = DTensor.from_local(local(placed), None, [UNEVEN], shape=(8, 3))
    assert torch.equal(part.full_tensor(), whole)
    plain = stock_distribute_tensor(whole, mesh, [Shard(0)])
    with record_comms() as ledger:
        assert torch.equal(plain.full_tensor(), whole)
        plain.redistribute(placements=[Shard(1)])
    assert ledger.count() == 0, "stock redistribution is PyTorch's own"
    assert oracle.local_shape((8, 3), (UNEVEN,), (4,), (1,)) == (0,)
    for placement in (Shard(0), UNEVEN):  # placements from a generator can be looked at once
        made = torch.distributed.tensor.distribute_tensor(whole, mesh, (p for p in [placement]))
        again = DTensor.from_local(local(made), mesh, (p for p in [placement]), shape=(8, 3), stride=(3, 1))
        with_gradient = DTensor.from_local(
            local(made), mesh, [placement], shape=(8, 3), stride=(3, 1), grad_placements=(p for p in [placement])
        )
        for result in (made, again, with_gradient):
            assert result.placements == (placement,) and torch.equal(result.full_tensor(), whole)
            moved = result.redistribute(placements=(p for p in [Replicate()]))
            assert moved.placements == (Replicate(),) and torch.equal(local(moved), whole)


def test_entry_points(ranks: RankPools) -> None:
    ranks.run(mixed_entry_points, world_size=4)
