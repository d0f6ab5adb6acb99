"""Where reduced gradients go, over which meshes, and what ranks that disagree are told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.gradients.buckets import of_buckets
from tests.placements.on_ranks import Source, make_mesh
from tests.ranks import RankPools
from tests.simulate import simulate
from vescale import GradientReducer
from vescale.comm import fused_bytes, record_comms, ring_bytes
from vescale.errors import GradientError
from vescale.optim import clip_grad_norm_
from vescale.placements import InterleavedShard, RaggedShard, from_local, normalize_placements

R, S, P = Replicate, Shard, Partial


class Loss(torch.autograd.Function):
    """A gradient that arrives as it is given, whatever the parameter is. Autograd copies one that others hold; before torch
    2.13 the copy of a sum was Replicate, and PyTorch communicated to write it."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.zeros((), dtype=gradient.dtype, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        gradient = ctx.gradient
        if torch.__version__ < "2.13":
            del ctx.gradient
        return gradient, None


CUBE = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
# shape, the parameter's placements, the gradient's
DESTINATIONS: list[tuple[Any, ...]] = [
    ((8, 6), (R(), R(), R()), (P(), P(), P())),
    ((8, 6), (R(), R(), S(0)), (P(), P(), S(0))),
    ((8, 6), (R(), R(), S(0)), (P(), P(), S(1))),  # brought to the target first
    ((8, 6), (R(), R(), R()), (P("avg"), P("avg"), R())),
    ((8, 6), (R(), R(), R()), (P("max"), P("max"), R())),
    ((9, 5), (S(0), R(), R()), (P(), P(), R())),  # scattered, uneven
    ((9, 5), (R(), S(1), R()), (P(), P(), R())),
    ((9, 5), (S(0), R(), S(1)), (P(), P(), S(1))),
    ((8, 6), (S(0), R(), S(0)), (P(), P(), S(0))),  # not within what a rank holds: all-reduced and cut
    ((8, 6), (S(0), S(1), R()), (P(), P(), R())),  # scattered on two axes: all-reduced and cut
    ((16, 3), (RaggedShard((0,), (1, 7)), R(), R()), (P(), P(), P())),
    ((16, 3), (RaggedShard((0,), (0, 8)), R(), R()), (P(), R(), P())),  # an empty part
    ((16, 3), (RaggedShard(), R(), S(0)), (P(), P(), S(0))),  # strided ragged
    ((12, 2), (InterleavedShard(0, 3), R(), R()), (P(), R(), R())),
    ((8, 6), (R(), R(), S(0)), (R(), R(), S(0))),  # complete as it comes
    ((8, 6), (S(0), R(), R()), (R(), R(), R())),
    ((), (R(), R(), R()), (P(), P(), R())),
]


def destinations(names: tuple[str, ...], mesh_ranks: Any, dtype: torch.dtype, huge: bool) -> None:
    mesh = DeviceMesh(device_type(), torch.tensor(mesh_ranks), mesh_dim_names=names)
    module = nn.Module()
    cases = list(DESTINATIONS)
    if huge:
        cases = [
            ((4096, 64), (RaggedShard(), R(), R()), (P(), P(), P())),
            ((4096, 64), (S(0), R(), R()), (P(), P(), R())),
        ][: 2 if NIGHTLY else 1]
    for index, (shape, own, _) in enumerate(cases):
        placed = normalize_placements(own, shape, mesh)
        zeros = from_local(torch.zeros(shape, dtype=dtype), mesh, [R()] * 3).redistribute(placements=list(placed))
        module.register_parameter(f"p{index}", nn.Parameter(zeros))
    reducer = GradientReducer(module, mesh, bucket_bytes=2**26 if huge else 2**20)
    for step in range(3 if NIGHTLY else 1 if huge else 2):
        sources = [Source(mesh, shape, came, dtype, 100 * step + i) for i, (shape, _, came) in enumerate(cases)]
        module.zero_grad()
        with record_comms() as ledger:
            losses = [
                Loss.apply(p, from_local(s.local.clone(), mesh, s.placements, shape=s.shape, stride=s.logical.stride()))
                for p, s in zip(module.parameters(), sources)
            ]
            torch.stack(losses).sum().backward()
        for (shape, _, came), parameter, source in zip(cases, module.parameters(), sources):
            assert parameter.grad.placements == parameter.placements
            expected = source.expected(parameter.placements)
            torch.testing.assert_close(
                parameter.grad.to_local(), expected, msg=lambda m, c=came, s=shape: f"{s} {c}: {m}"
            )
        found = of_buckets(ledger)
        assert len(found) == sum(bucket.num_collectives for bucket in reducer.buckets)
        for bucket in reducer.buckets:
            moved = sum(r.bytes for r in found if r.requester.startswith(f"bucket {bucket.index}:"))
            assert moved == bucket.moved_bytes
    for bucket in reducer.buckets if huge else ():
        # reduce-scatter on one axis, all-reduce of the piece on the rest: less than the all-reduce of everything
        others = bucket.reduction.stages[0].axes.num_ranks // 2
        assert bucket.scatters and bucket.num_collectives == 2
        assert bucket.moved_bytes == bucket.num_bytes // 2 + ring_bytes("all_reduce", bucket.num_bytes // 2, others)
        assert bucket.moved_bytes < fused_bytes(bucket.num_bytes, bucket.reduction.stages[0].axes.sizes)
    norm = clip_grad_norm_(module.parameters(), 1.0)
    logical = torch.cat([source.logical.flatten() for source in sources])
    torch.testing.assert_close(norm, logical.norm(), rtol=1e-5, atol=0)


def test_destinations(ranks: RankPools) -> None:
    for dtype in (torch.float64, torch.float32)[: 2 if NIGHTLY else 1]:
        ranks.run(destinations, ("dp", "cp", "tp"), CUBE, dtype, False, world_size=8)


def test_reduce_scatter_with_all_reduce_of_the_piece(ranks: RankPools) -> None:
    ranks.run(destinations, ("dp", "cp", "tp"), CUBE, torch.float64, True, world_size=8)


def several_meshes(flattenable: bool) -> None:
    """Tensor-parallel DTensors on a mesh of their own, plain parameters, reduced over dp as well."""
    rank = dist.get_rank()
    if flattenable:
        root = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = root["dp"], root["tp"]
    else:  # sliced from no common mesh
        dp = [make_mesh((0, 2, 4, 6)), make_mesh((1, 3, 5, 7))][rank % 2]
        tp = [make_mesh((first, first + 1)) for first in range(0, 8, 2)][rank // 2]
    for given in (dp, root) if flattenable else (dp,):
        module = nn.Module()
        module.cut = nn.Parameter(from_local(torch.zeros(3), tp, [S(0)]))
        module.norm = nn.Parameter(from_local(torch.zeros(5), tp, [R()]))
        module.plain = nn.Parameter(torch.zeros(2))
        reducer = GradientReducer(module, given, op="sum")
        for step in range(2):
            module.zero_grad()
            values = [torch.full((n,), float(rank + 1 + step)) for n in (3, 5, 2)]
            gradients = [from_local(values[0], tp, [S(0)]), from_local(values[1], tp, [P()]), values[2]]
            losses = [Loss.apply(p, gradients.pop(0)) for p in module.parameters()]
            with record_comms() as ledger:
                torch.stack(losses).sum().backward()
            along_dp = sum(r + 1 + step for r in range(rank % 2, 8, 2))
            everyone = sum(r + 1 + step for r in range(8))
            assert torch.equal(module.cut.grad.to_local(), torch.full((3,), float(along_dp)))
            assert torch.equal(module.norm.grad.to_local(), torch.full((5,), float(everyone)))
            assert module.norm.grad.placements == (R(),)
            plain = everyone if given is not dp else along_dp
            assert torch.equal(module.plain.grad, torch.full((2,), float(plain)))
            expected = {tuple(s.axes.num_ranks for s in b.reduction.stages) for b in reducer.buckets}
            assert expected == ({(4,), (8,)} if flattenable else {(4,), (2, 4)})
            assert len(of_buckets(ledger)) == sum(b.num_collectives for b in reducer.buckets)
        assert ("then" in " ".join(reducer.describe())) is not flattenable


@pytest.mark.parametrize("flattenable", [True, False])
def test_axes_of_several_meshes(ranks: RankPools, flattenable: bool) -> None:
    ranks.run(several_meshes, flattenable, world_size=8)


def disagreements() -> None:
    mesh, rank = make_mesh(((0, 1), (2, 3))), dist.get_rank()
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    if rank == 2:
        module[1].bias.requires_grad_(False)
    with pytest.raises(GradientError, match=r"'1\.bias' .* is \(3,\) .*\[0, 1, 3\] and .*frozen on rank 2"):
        GradientReducer(module, mesh)
    module[1].bias.requires_grad_(True)
    if rank == 1:
        module[0].weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(GradientError, match=r"'0\.weight' .* is \(3, 2\) .*\[0, 2, 3\] and \(3, 3\) .*rank 1"):
        GradientReducer(module, mesh)
    module = nn.Linear(2, 3)
    with pytest.raises(GradientError, match=r"op=(sum|avg)"):
        GradientReducer(module, mesh, op="sum" if rank == 3 else "avg")

    module = nn.Module()
    module.first = nn.Parameter(from_local(torch.zeros(4), mesh, [R(), R()]))
    module.second = nn.Parameter(from_local(torch.zeros(4), mesh, [R(), R()]))
    reducer = GradientReducer(module, mesh)

    def sent(on_the_second_axis: Any) -> Any:
        return from_local(torch.ones(4), mesh, [P(), on_the_second_axis])

    losses = [Loss.apply(module.first, sent(P())), Loss.apply(module.second, sent(P() if rank == 3 else R()))]
    with pytest.raises(GradientError, match=r"second\.grad arrives as .*on rank 3, but as .*on rank 0"):
        torch.stack(losses).sum().backward()

    with pytest.raises(ValueError, match="first already has a GradientReducer"):
        GradientReducer(module, mesh)
    reducer.remove()
    module.zero_grad()
    reducer = GradientReducer(module, mesh, timeout=timedelta(seconds=3))
    for step in range(2):
        is_other = rank == 1 and step == 1
        loss = Loss.apply(module.first, sent(R())) + Loss.apply(module.second, sent(P() if is_other else R()))
        if is_other:
            with pytest.raises(RuntimeError, match=r"second\.grad arrives as .*did not arrive at the comparison"):
                loss.backward()
        else:
            loss.backward()
    assert reducer.num_buckets == 1


def test_ranks_that_disagree_are_told(ranks: RankPools) -> None:
    ranks.run(disagreements)


def mistakes() -> None:
    mesh = make_mesh(((0, 1), (2, 3)))
    with pytest.raises(ValueError, match="op='mean'"):
        GradientReducer(nn.Linear(2, 2), mesh, op="mean")  # type: ignore[arg-type]
    for wrong in (0, [], [3, -1], "large", 2.5, None):
        with pytest.raises(ValueError, match="bucket_bytes"):
            GradientReducer(nn.Linear(2, 2), mesh, bucket_bytes=wrong)  # type: ignore[arg-type]
    for dtype in (torch.int32, torch.bool, "float32"):
        with pytest.raises(ValueError, match=r"reduce_dtype=.*use a floating-point"):
            GradientReducer(nn.Linear(2, 2), mesh, reduce_dtype=dtype)  # type: ignore[arg-type]
    for arguments in (([nn.Linear(2, 2)], mesh), (nn.Linear(2, 2), "dp")):
        with pytest.raises(TypeError, match=r"pass an nn\.Module and a DeviceMesh"):
            GradientReducer(*arguments)  # type: ignore[arg-type]
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    GradientReducer(module, mesh, reduce_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"phase: a gradient of torch\.complex64 would lose its imaginary part"):
        module.phase.abs().sum().backward()
    small = make_mesh((0, 1))
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="not part of"):
            GradientReducer(nn.Linear(2, 2), small)


def test_mistakes(ranks: RankPools) -> None:
    ranks.run(mistakes)


def empty_maxima() -> None:
    """A parameter without elements has a gradient on all ranks when it has one on any."""
    mesh, rank = make_mesh(((0, 1), (2, 3))), dist.get_rank()
    for op in ("max", "min", "sum"):
        module = nn.Module()
        for name, size in (("some", 3), ("none", 0), ("unused", 0)):
            module.register_parameter(name, nn.Parameter(from_local(torch.zeros(size), mesh, [R(), R()])))
        GradientReducer(module, mesh)
        for step in range(3):
            module.zero_grad()
            uses = [module.some] if rank == 1 and step == 2 else [module.some, module.none]
            losses = [Loss.apply(p, from_local(torch.full(p.shape, -1.0 - rank), mesh, [P(op), P(op)])) for p in uses]
            torch.stack(losses).sum().backward()
            assert module.none.grad.shape == (0,) and module.unused.grad is None
            assert module.some.grad.to_local().tolist() == [{"max": -1.0, "min": -4.0, "sum": -10.0}[op]] * 3


def test_empty_gradients(ranks: RankPools) -> None:
    ranks.run(empty_maxima, timeout=60)


def on_64() -> tuple[int, int]:
    nested = torch.arange(64).view(4, 4, 4)
    mesh = DeviceMesh(device_type(), nested, mesh_dim_names=("dp", "cp", "tp"))
    module = nn.Module()
    kinds = [
        ((R(), R(), R()), (P(), P(), P())),
        ((R(), R(), S(0)), (P(), P(), S(0))),
        ((RaggedShard(), R(), R()), (P(), P(), R())),
    ]
    cases = [(shape, *kind) for shape in ((8, 3), (5,), (16, 2)) for kind in kinds]
    for index, (shape, own, _) in enumerate(cases):
        zeros = from_local(torch.zeros(shape, dtype=torch.float64), mesh, [R()] * 3)
        placed = zeros.redistribute(placements=list(normalize_placements(own, shape, mesh)))
        module.register_parameter(f"p{index}", nn.Parameter(placed))
    reducer = GradientReducer(module, mesh)
    for step in range(2):
        module.zero_grad()
        sources = [Source(mesh, shape, came, torch.float64, 100 * step + i) for i, (shape, _, came) in enumerate(cases)]
        with record_comms() as ledger:
            losses = [
                Loss.apply(p, from_local(s.local.clone(), mesh, s.placements, shape=s.shape, stride=s.logical.stride()))
                for p, s in zip(module.parameters(), sources)
            ]
            torch.stack(losses).sum().backward()
        for parameter, source in zip(module.parameters(), sources):
            torch.testing.assert_close(parameter.grad.to_local(), source.expected(parameter.placements))
    assert len(ledger.records) == sum(bucket.num_collectives for bucket in reducer.buckets)
    assert ledger.bytes() == sum(bucket.moved_bytes for bucket in reducer.buckets)
    assert {bucket.reduction.stages[0].axes.num_ranks for bucket in reducer.buckets} == {64, 16}
    return reducer.num_buckets, len(ledger.records)


def test_64_simulated_ranks() -> None:
    # one of the buckets is scattered over dp, and its pieces all-reduced over cp
    assert set(simulate(on_64, 64, timeout=300)) == {(3, 4)}
