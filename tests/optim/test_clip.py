"""Clipping on any meshes and placements against ``torch.nn.utils.clip_grad_norm_`` of the same gradients on one device."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.examples import NIGHTLY, daily_sample
from tests.placements.on_ranks import Source, make_mesh
from tests.ranks import RankPools, run_cases
from tests.runtime.llama import counted
from tests.simulate import simulate
from vescale.comm import record_comms
from vescale.compat import make_dtensor, make_spec
from vescale.fsdp import fully_shard
from vescale.optim import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, from_local

DENSE = ((0, 1, 2, 3), (4, 5, 6, 7))  # dp=2, tp=4
EXPERT = ((0, 1), (2, 3), (4, 5), (6, 7))  # ep=4, edp=2: the same ranks
FEW = (0, 1, 2, 3, 4, 5, 6, 7)
TURNED = ((0, 4), (1, 5), (2, 6), (3, 7))  # each axis spans the same ranks as one of DENSE's
R, S, P = Replicate, Shard, Partial

# mesh ranks (None: a plain tensor), shape, placements
DENSE_GRADIENTS: list[tuple[Any, ...]] = [
    (DENSE, (8, 4), (R(), S(0))),
    (DENSE, (5, 7), (S(0), S(1))),  # uneven
    (DENSE, (3,), (R(), S(0))),  # the last rank has nothing
    (DENSE, (6,), (R(), R())),
    (DENSE, (), (R(), R())),
]
MIXED: list[tuple[Any, ...]] = [
    *DENSE_GRADIENTS,
    (EXPERT, (8, 6), (S(0), R())),
    (EXPERT, (8, 6, 2), (S(0), RaggedShard((0,), (1, 0)))),  # ragged, and an empty shard
    (EXPERT, (16, 3), (RaggedShard(), S(0))),  # becomes strided ragged
    (FEW, (9, 3), (RaggedShard((0,), (0, 3, 0, 1, 2, 0, 3, 0)),)),
    (FEW, (7,), (RaggedShard((), (0, 0, 0, 1, 0, 0, 0, 0)),)),
    (DENSE, (24, 2), (R(), InterleavedShard(0, 3))),
    (None, (4, 3), ()),
    (None, (2,), ()),
    (DENSE, (6, 5), (P(), R())),
    (DENSE, (2, 9), (P(), S(1))),
    (DENSE, (11,), (P(), P())),
    (DENSE, (3, 3), (P("avg"), P("avg"))),
    (DENSE, (4,), (P("max"), R())),
    (EXPERT, (5,), (P("avg"), R())),
    (TURNED, (3, 2), (S(0), P())),
    (TURNED, (7,), (R(), P("avg"))),
]
ORDERS = [2, 2.0, 1, 3, 0, math.inf, "inf", -math.inf, 0.5, -1, 4]


def build(
    cases: list[tuple[Any, ...]], dtype: torch.dtype, spoil: float | None = None
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """(parameters with these gradients, the same on one device); the first element of the first replaced by ``spoil``."""
    own, reference = [], []
    for seed, (ranks, shape, placements) in enumerate(cases):
        if ranks is None:
            logical = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            gradient: torch.Tensor = logical.clone()
        else:
            mesh = make_mesh(ranks)
            source = Source(mesh, shape, placements, dtype, seed)
            logical = source.logical.clone()
            gradient = from_local(source.local.clone(), mesh, source.placements, shape=shape, stride=logical.stride())
        if seed == 0 and spoil is not None:
            logical.view(-1)[0] = spoil
            if dist.get_rank() in (0, 4):  # those that hold row 0
                gradient.to_local().view(-1)[0] = spoil
        parameter = torch.nn.Parameter(torch.zeros_like(gradient) if ranks is None else full(gradient, mesh))
        parameter.grad = gradient
        own.append(parameter)
        reference.append(torch.nn.Parameter(torch.zeros_like(logical)))
        reference[-1].grad = logical
    return own, reference


def full(gradient: DTensor, mesh: DeviceMesh) -> DTensor:
    """A parameter as gradients of all placements may have it: whole on every rank."""
    return from_local(torch.zeros(gradient.shape, dtype=gradient.dtype), mesh, [R()] * mesh.ndim)


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank holds of the tensor if it is placed like another one."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def check(
    cases: str, order: Any, max_norm: float, dtype: torch.dtype, foreach: bool | None, spoil: float | None
) -> None:
    own, reference = build(globals()[cases], dtype, spoil)
    own.append(torch.nn.Parameter(torch.zeros(3)))  # without a gradient
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm, order)
    before = [p.grad.placements if isinstance(p.grad, DTensor) else None for p in own]
    norm = clip_grad_norm_(iter(own), max_norm, order, foreach=foreach)
    assert type(norm) is torch.Tensor and norm.dtype == expected.dtype and norm.shape == ()
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(norm, expected, rtol=tolerance, atol=0, equal_nan=True)
    everyone = [torch.zeros_like(norm.double()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, norm.double())
    assert all(torch.equal(other.nan_to_num(), everyone[0].nan_to_num()) for other in everyone)
    for a, b, placements in zip(own, reference, before):
        torch.testing.assert_close(whole(a.grad), b.grad, rtol=tolerance, atol=1e-30, equal_nan=True)
        if placements is not None:
            assert tuple(a.grad.placements) == tuple(R() if p.is_partial() else p for p in placements)
    assert own[-1].grad is None


def run_checks(cases: list[tuple[Any, ...]]) -> int:
    return run_cases(check, cases)


def test_equals_one_device(ranks: RankPools) -> None:
    cases = [
        (name, order, max_norm, torch.float64, foreach, None)
        for name in ("DENSE_GRADIENTS", "MIXED")
        for order in ORDERS
        for max_norm, foreach in ((1.0, None), (1e9, False))
    ]
    cases += [
        ("MIXED", order, 0.1, dtype, True, None)
        for order in (2, 1, math.inf)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    cases += [
        ("MIXED", order, 1.0, torch.float32, foreach, spoil)
        for order in (2, 1, math.inf, -math.inf, 0)
        for spoil in (math.nan, math.inf, -math.inf)
        for foreach in (None, False)
    ]
    cases = daily_sample(cases)
    assert set(ranks.run(run_checks, cases, world_size=8)) == {len(cases)}


def counts() -> None:
    """One reduction for each set of axes, one all-reduce for each kind of pending gradient, nothing else."""
    for order in (2, math.inf, 0):
        own, _ = build(MIXED, torch.float64)
        with record_comms() as ledger, counted() as counter:
            clip_grad_norm_(own, 1.0, order)
        norms = [record for record in ledger.records if record.requester == "norm of gradients"]
        # tp of dense and turned; all 8 ranks (dp and tp; expert ep and edp; the flat mesh); expert: ep
        assert len(norms) == 3, norms
        assert order == 0 or all(record.bytes <= 8 * 8 for record in norms)
        # over dp of dense and turned: sum and max; over both axes: sum, average and sum; expert, over ep: average
        assert len(ledger.records) - len(norms) == 4
        assert sum(counter.values()) == len(ledger.records)
        with record_comms() as ledger:
            clip_grad_norm_(own, 1.0, order)  # complete now
        assert len(ledger.records) == 3


def several_ops() -> None:
    """Averages over one axis and sums over the other are one sum, divided."""
    mesh, rank = make_mesh(DENSE), dist.get_rank()
    parameter = torch.nn.Parameter(from_local(torch.zeros(3), mesh, [R(), R()]))
    parameter.grad = from_local(torch.full((3,), rank + 1.0), mesh, (P("avg"), P()))
    with record_comms() as ledger:
        norm = clip_grad_norm_(parameter, 1e9, 1)
    expected = torch.arange(1.0, 9).view(2, 4).mean(0).sum()
    torch.testing.assert_close(norm, 3 * expected)
    torch.testing.assert_close(whole(parameter.grad), expected.repeat(3))
    assert len(ledger.records) == 1


def mixed_ops() -> None:
    """A maximum over one axis and a sum over the other cannot be one reduction; any rank's seed of hashes gives the same."""
    mesh, rank = make_mesh(DENSE), dist.get_rank()
    parameter = torch.nn.Parameter(from_local(torch.zeros(3), mesh, [R(), R()]))
    values = torch.arange(1.0, 9).view(2, 4)
    for placements, expected in [
        ((P("max"), P()), values.amax(0).sum()),
        ((P(), P("max")), values.sum(0).amax()),
        ((P("max"), P("min")), values.amax(0).amin()),
    ]:
        # PyTorch makes no such tensor, unless it is built from its spec.
        spec = make_spec(mesh, placements, (3,), (1,), torch.float32)
        parameter.grad = make_dtensor(torch.full((3,), rank + 1.0), spec)
        clip_grad_norm_(parameter, 1e9)
        torch.testing.assert_close(whole(parameter.grad), expected.repeat(3))


def test_pending_ops_that_do_not_mix(ranks: RankPools) -> None:
    ranks.run(mixed_ops, world_size=8)


def test_several_pending_ops(ranks: RankPools) -> None:
    ranks.run(several_ops, world_size=8)


def test_one_reduction_for_each_set_of_axes(ranks: RankPools) -> None:
    ranks.run(counts, world_size=8)


def errors() -> None:
    own, _ = build(DENSE_GRADIENTS, torch.float64, math.nan)
    before = [whole(p.grad).clone() for p in own]
    with pytest.raises(RuntimeError, match=r"order 2\.0 for gradients .* is non-finite"):
        clip_grad_norm_(own, 1.0, error_if_nonfinite=True)
    assert all(torch.equal(whole(p.grad).nan_to_num(), b.nan_to_num()) for p, b in zip(own, before))
    own, _ = build(DENSE_GRADIENTS, torch.float64)
    assert clip_grad_norm_(own, 1.0, error_if_nonfinite=True) > 1
    for nothing in ([], [torch.nn.Parameter(torch.zeros(3))]):
        assert clip_grad_norm_(nothing, 1.0).item() == 0
    for wrong in (torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1).named_parameters()):
        with pytest.raises(TypeError, match=r"clip_grad_norm_ got a (Linear|tuple) .*pass `model\.parameters\(\)`"):
            clip_grad_norm_(wrong, 1.0)
    spent = iter(own)
    list(spent)
    with pytest.warns(UserWarning, match="exhausted iterator"):
        clip_grad_norm_(spent, 1.0)
    mesh = make_mesh((0, 1))
    outside = torch.nn.Parameter(torch.zeros(4))
    gradient = from_local(torch.zeros(2), mesh, [RaggedShard()], shape=(4,)) if dist.get_rank() < 2 else None
    if gradient is None:
        gradient = from_local(torch.zeros(0), mesh, [RaggedShard()], shape=(4,))
        with pytest.raises(ValueError, match="not part of"):
            get_total_norm(gradient)
    assert outside.grad is None


def test_errors(ranks: RankPools) -> None:
    ranks.run(errors, world_size=8)


def missing_on_some_ranks() -> None:
    """A gradient that this rank does not have, the only one on its axes: every rank takes part in the reduction."""
    mesh = make_mesh(((0, 1), (2, 3)))
    # placements, the ranks without a gradient, and how many of the first rows they have
    cases: list[tuple[list[Any], set[int], int]] = [
        ([S(0), R()], {0, 1}, 2),
        ([R(), S(0)], {0, 2}, 2),
        ([S(0), S(0)], {0}, 1),
        ([R(), R()], set(), 0),
    ]
    for order in (2.0, math.inf, 0.0):
        own, reference = [], []
        for number, (cut, lacking, rows) in enumerate(cases):
            value = torch.full((4, 4), number + 1.0)
            own.append(torch.nn.Parameter(distribute_tensor(value, mesh, cut, src_data_rank=None)))
            reference.append(torch.nn.Parameter(value))
            reference[-1].grad = value.clone()
            reference[-1].grad[:rows] = 0
            if dist.get_rank() not in lacking:
                own[-1].grad = distribute_tensor(reference[-1].grad.clone(), mesh, cut, src_data_rank=None)
        expected = torch.nn.utils.clip_grad_norm_(reference, 1.0, order)
        torch.testing.assert_close(clip_grad_norm_(own, 1.0, order), expected)
        for p, twin in zip(own, reference):
            if p.grad is not None:
                wanted = distribute_tensor(twin.grad, mesh, p.placements, src_data_rank=None).to_local()
                torch.testing.assert_close(p.grad.to_local(), wanted)


def test_gradients_that_are_missing_on_some_ranks(ranks: RankPools) -> None:
    ranks.run(missing_on_some_ranks, world_size=4)


def pieces() -> None:
    """The norm of two sets at once is that of their norms; pending gradients are left as they are."""
    own, reference = build(MIXED, torch.float64)
    with record_comms() as ledger:
        norms = [get_total_norm([p.grad for p in half]) for half in (own[:9], own[9:])]
    assert any(isinstance(p.grad, DTensor) and any(q.is_partial() for q in p.grad.placements) for p in own)
    total = torch.stack(norms).square().sum().sqrt()
    with record_comms() as ledger:
        clip_grads_with_norm_(own, 3.0, total)
    assert not ledger.records
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(reference, 3.0), rtol=1e-12, atol=0)
    for a, b in zip(own, reference):
        torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-12, atol=1e-30)


def test_norm_and_scaling_by_themselves(ranks: RankPools) -> None:
    ranks.run(pieces, world_size=8)


def everything(orders: list[Any]) -> None:
    """Gradients of ``fully_shard``, of experts and of tensor parallel layers, ragged, empty, plain and pending, at once;
    also with nan and infinities, wherever they are."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def layers() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).double()

    def inputs(rank: int) -> torch.Tensor:
        return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    sharded, whole_model = layers(), layers()
    fully_shard(sharded, mesh=make_mesh(FEW))
    spoils = (math.nan, math.inf, -math.inf)
    cases: list[Any] = [(None, order) for order in daily_sample(orders)]
    cases += itertools.product(spoils, orders) if NIGHTLY else zip(spoils, (2, 0, math.inf))
    for spoil, order in cases:
        own, reference = build(MIXED, torch.float64)
        if spoil is not None:  # one element of the pending sum over all ranks
            where = MIXED.index((DENSE, (11,), (P(), P())))
            own[where].grad.to_local()[3] = spoil
            reference[where].grad[3] = spoil
        sharded.zero_grad()
        whole_model.zero_grad()
        sharded(inputs(rank)).square().sum().backward()
        (sum(whole_model(inputs(r)).square().sum() for r in range(world)) / world).backward()
        assert any(p.grad.to_local().numel() == 0 for p in sharded.parameters()) or rank == 0
        own += sharded.parameters()
        reference += whole_model.parameters()
        expected = torch.nn.utils.clip_grad_norm_(reference, 0.7, order)
        NoWaiting.num_syncs = 0
        with record_comms() as ledger, counted() as counter, NoWaiting():
            norm = clip_grad_norm_(own, 0.7, order)
        assert NoWaiting.num_syncs == 0
        requesters = Counter(record.requester for record in ledger.records)
        assert requesters == {"norm of gradients": 3, "pending gradients": 4}
        assert sum(counter.values()) == 7
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0, equal_nan=True)
        for a, b in zip(own, reference):
            torch.testing.assert_close(local(a.grad), part(b.grad, a.grad), rtol=1e-12, atol=1e-30, equal_nan=True)
        if spoil is not None and not math.isfinite(norm):
            with pytest.raises(RuntimeError, match="non-finite"), NoWaiting():
                clip_grad_norm_(own, 0.7, order, error_if_nonfinite=True)
            assert NoWaiting.num_syncs == 1


def test_everything_in_one_call(ranks: RankPools) -> None:
    ranks.run(everything, ORDERS, world_size=8)


class NoWaiting(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    num_syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            NoWaiting.num_syncs += 1
        return func(*args, **(kwargs or {}))


def waits() -> None:
    for order in ORDERS if NIGHTLY else (2, 0, math.inf, 0.5):
        own, _ = build(MIXED, torch.float32)
        clip_grad_norm_(own, 1.0, order)
        for error_if_nonfinite in (False, True):
            NoWaiting.num_syncs = 0
            with NoWaiting():
                clip_grad_norm_(own, 1.0, order, error_if_nonfinite=error_if_nonfinite)
            assert NoWaiting.num_syncs == int(error_if_nonfinite), order


def test_the_host_waits_at_most_once(ranks: RankPools) -> None:
    ranks.run(waits, world_size=8)


def on_64() -> None:
    mesh = make_mesh(tuple(tuple(tuple(range(16 * i + 4 * j, 16 * i + 4 * j + 4)) for j in range(4)) for i in range(4)))
    own, reference = [], []
    for seed, placements in enumerate(
        [(R(), S(0), S(1)), (RaggedShard(), S(0), R()), (P(), P(), S(0)), (S(0), S(0), R())]
    ):
        source = Source(mesh, (24, 6), placements, torch.float64, seed)
        own.append(torch.nn.Parameter(torch.zeros(24, 6, dtype=torch.float64)))
        gradient = from_local(source.local.clone(), mesh, source.placements, shape=(24, 6), stride=(6, 1))
        own[-1] = torch.nn.Parameter(from_local(torch.zeros(24, 6, dtype=torch.float64), mesh, [R()] * 3))
        own[-1].grad = gradient
        reference.append(torch.nn.Parameter(torch.zeros(24, 6, dtype=torch.float64)))
        reference[-1].grad = source.logical.clone()
    torch.testing.assert_close(clip_grad_norm_(own, 1.0), torch.nn.utils.clip_grad_norm_(reference, 1.0))


def test_64_simulated_ranks() -> None:
    simulate(on_64, 64)


def test_plain_tensors_need_no_process_group() -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(4, 3)).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    reference = torch.nn.utils.get_total_norm(expected, 3.0)
    assert not dist.is_initialized()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5, 3.0), reference)
    for p, e in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, e * 0.5 / (reference + 1e-6))


def check_complex(order: Any, foreach: bool | None) -> None:
    mesh = make_mesh((0, 1))
    own, reference = [], []
    for place, dtype in itertools.product((S(0), R(), P(), None), (torch.complex64, torch.float32, torch.complex128)):
        value = torch.randn(4, 3, dtype=dtype, generator=torch.Generator().manual_seed(len(own)))
        grad: torch.Tensor = value.clone()
        if isinstance(place, P):
            grad = from_local(value / 2, mesh, [place])
        elif place is not None:
            grad = distribute_tensor(value, mesh, [place], src_data_rank=None)
        own.append(torch.nn.Parameter(full(grad, mesh) if isinstance(grad, DTensor) else torch.zeros_like(value)))
        own[-1].grad = grad
        reference.append(torch.nn.Parameter(torch.zeros_like(value)))
        reference[-1].grad = value.clone()
    wanted = torch.nn.utils.clip_grad_norm_(reference, 0.5, order, foreach=False)
    torch.testing.assert_close(clip_grad_norm_(own, 0.5, order, foreach=foreach), wanted, rtol=1e-6, atol=0)
    for a, b in zip(own, reference):
        torch.testing.assert_close(whole(a.grad), b.grad)


def run_complex(cases: list[tuple[Any, ...]]) -> int:
    return run_cases(check_complex, cases)


def test_complex_gradients(ranks: RankPools) -> None:
    ranks.run(run_complex, list(itertools.product([2, 1, 0, math.inf, 0.5], (None, True, False))), world_size=2)
