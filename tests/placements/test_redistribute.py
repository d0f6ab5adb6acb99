"""Every pair of placements on gloo ranks, against the oracle's local tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import daily_sample
from tests.placements import oracle
from tests.placements.on_ranks import Source, local, make_mesh, sample
from tests.placements.specs import draw_placements, draw_shape, draw_units
from tests.ranks import RankPools, run_cases
from vescale.comm import MAX_PADDING, Ledger, record_comms
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    from_local,
    has_custom,
    normalize_placements,
    redistribute,
)
from vescale.placements._redistribute import move_local

WORLDS = [1, 2, 3, 4, 8]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def dtype_for(index: int, placements: tuple[Any, ...]) -> torch.dtype:
    """Every dtype in turn; where a reduction has no meaning for it, float64."""
    dtype = DTYPES[index % len(DTYPES)]
    for placement in placements:
        if not placement.is_partial():
            continue
        if placement.is_partial("avg") and dtype in (torch.int64, torch.bool):
            return torch.float64
        if (dtype.is_complex and not placement.is_partial("sum")) or (dtype == torch.bool):
            return torch.float64
    return dtype


def move_and_compare(
    mesh_ranks: Any, shape: tuple[int, ...], source: tuple[Any, ...], target: tuple[Any, ...], index: int
) -> None:
    mesh = make_mesh(mesh_ranks)
    dtype = dtype_for(index, (*source, *target))
    source, target = normalize_placements(source, shape, mesh), normalize_placements(target, shape, mesh)
    tensor = Source(mesh, shape, source, dtype, seed=index)
    context = f"{dtype} {shape} {source} -> {target} on {tuple(mesh.shape)}"
    if not has_custom((*source, *target)):  # stock DTensor's business, but our exchange must be right there, too
        tensor.check(move_local(tensor.local, mesh, shape, source, target).wait(), target, context)
        return
    before = tensor.dtensor()
    with record_comms() as ledger:
        after = redistribute(before, placements=target)
    check_bytes(tensor, target, ledger, context)
    assert type(after) is DTensor and after.placements == target and after.shape == torch.Size(shape)
    tensor.check(local(after), target, context)
    assert torch.equal(local(before), tensor.local), f"{context}: the source changed"
    if has_custom(source):
        tensor.check(before.full_tensor(), (Replicate(),) * mesh.ndim, f"{context}: full_tensor of the source")
    back = tuple(Replicate() if placement.is_partial() else placement for placement in source)
    if has_custom((*target, *back)):
        tensor.check(local(redistribute(after, placements=back)), back, f"{context} and back")


def check_bytes(tensor: Source, target: tuple[Any, ...], ledger: Ledger, context: str) -> None:
    """Between placements without pending reductions exactly the elements that change owner arrive, in one exchange."""
    itemsize = tensor.logical.element_size()
    padding = sum(r.padding_bytes for r in ledger.records)
    assert padding <= MAX_PADDING * tensor.logical.numel() * itemsize, context
    if tensor.coordinate is None:
        assert ledger.count() == 0, context
        return
    if any(p.is_partial() for p in (*tensor.placements, *target)):
        return
    mesh_shape = tuple(tensor.mesh.shape)

    def held(placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> set[int]:
        return set(oracle.local_indices(tensor.shape, placements, mesh_shape, coordinate))

    def arriving(coordinate: tuple[int, ...]) -> set[int]:
        return held(target, coordinate) - held(tensor.placements, coordinate)

    own = arriving(tuple(tensor.coordinate))
    assert ledger.bytes() - padding == len(own) * itemsize, f"{context}: {ledger}"
    assert ledger.count() <= 1, f"{context}: {ledger}"
    if not own and ledger.count():
        assert any(map(arriving, oracle.coordinates(mesh_shape))), f"{context}: nothing changes owner, but {ledger}"


def all_forms(num_ranks: int, shape: tuple[int, ...], seed: int) -> list[Any]:
    rng = random.Random(seed)
    numel = torch.Size(shape).numel()
    whole_on_one = tuple(int(rank == num_ranks - 1) for rank in range(num_ranks))
    return [
        RaggedShard((0, 1), draw_units(rng, numel, num_ranks)),  # element-wise
        RaggedShard((0,), draw_units(rng, shape[0], num_ranks)),  # row-wise
        RaggedShard((0,), draw_units(rng, 1, num_ranks)),
        RaggedShard((0, 1), draw_units(rng, -(-numel // 4), num_ranks), block=4),
        RaggedShard((), whole_on_one),
        RaggedShard(),
        InterleavedShard(0, 3),
        InterleavedShard(1, 2),
        Shard(0),
        Shard(1),
        _StridedShard(0, split_factor=2),
        Replicate(),
        Partial("sum"),
        Partial("avg"),
        Partial("max"),
        Partial("min"),
    ]


def one_axis_pairs(world_size: int, shape: tuple[int, ...]) -> int:
    forms = all_forms(world_size, shape, seed=world_size)
    ranks = tuple(range(world_size))
    pairs = [(s, t) for s in forms for t in forms if s == t or not (s.is_partial() and t.is_partial())]
    assert len(pairs) == 16 * 16 - 4 * 3
    if world_size == 8 and shape != (7, 6):
        pairs = random.Random(8).sample(pairs, 80)
    return run_cases(
        move_and_compare, daily_sample([(ranks, shape, (s,), (t,), n) for n, (s, t) in enumerate(pairs)], 2)
    )


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("shape", [(7, 6), (8, 4), (2, 3)])
def test_every_pair_on_one_axis(ranks: RankPools, world_size: int, shape: tuple[int, ...]) -> None:
    ranks.run(one_axis_pairs, world_size, shape, world_size=world_size)


def random_pairs(mesh_ranks: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    mesh_shape = tuple(torch.tensor(mesh_ranks).shape)
    cases = []
    for index in range(count):
        shape = draw_shape(rng)
        op = rng.choice(("sum", "avg", "max", "min"))
        source = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.5 else ())
        target = draw_placements(rng, shape, mesh_shape, partial_ops=(op,) if rng.random() < 0.2 else ())
        cases.append((mesh_ranks, shape, source, target, index))
    return run_cases(move_and_compare, daily_sample(cases, 2))


@pytest.mark.parametrize(
    "mesh_ranks",
    [
        (0, 1, 2),
        (2, 0, 1),
        ((0, 1), (2, 3)),
        ((3, 1), (2, 0)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((7, 2), (0, 5), (1, 6), (3, 4)),
        (((0, 1), (2, 3)), ((4, 5), (6, 7))),
        (((5, 0), (7, 2)), ((1, 4), (3, 6))),
        (((0,), (1,)), ((2,), (3,))),
    ],
    ids=str,
)
def test_random_pairs(ranks: RankPools, mesh_ranks: Any) -> None:
    world_size = torch.tensor(mesh_ranks).numel()
    ranks.run(random_pairs, mesh_ranks, 7, 80, world_size=world_size)


@pytest.mark.parametrize("mesh_ranks", [(1, 3), (2,), ((2, 0), (3, 1)), ((6,), (1,)), ((0, 7, 3), (4, 1, 6))], ids=str)
def test_meshes_over_a_part_of_the_world(ranks: RankPools, mesh_ranks: Any) -> None:
    """Ranks outside hold nothing, communicate nothing, and neither hang nor fail."""
    ranks.run(random_pairs, mesh_ranks, 11, 40, world_size=8)


def scatter_and_compare(
    mesh_ranks: Any, shape: tuple[int, ...], placements: tuple[Any, ...], source_rank: int | None, index: int
) -> None:
    mesh = make_mesh(mesh_ranks)
    dtype = DTYPES[index % len(DTYPES)]
    coordinate = mesh.get_coordinate()
    # Every rank passes values of its own; only those of the source coordinate count.
    seed = 0 if source_rank is None or coordinate is None else sum(c * 10**a for a, c in enumerate(coordinate))
    whole = sample(shape, dtype, seed)
    source = 0 if source_rank is None else sum(source_rank * 10**axis for axis in range(mesh.ndim))
    floats = dtype.is_floating_point or dtype.is_complex
    placed = distribute_tensor(whole.requires_grad_(floats), mesh, placements, src_data_rank=source_rank)
    assert placed.requires_grad == floats and placed.is_leaf and placed.shape == whole.shape
    if coordinate is None:
        assert local(placed).numel() == 0
        return
    expected = oracle.local_tensor(sample(shape, dtype, source), placed.placements, tuple(mesh.shape), coordinate)
    assert local(placed).shape == expected.shape, f"{shape} {placements}"
    assert torch.equal(local(placed).detach(), expected), f"{shape} {placements} from {source_rank}"
    before = whole.detach().clone()
    local(placed).data.fill_(1)
    assert torch.equal(whole.detach(), before), "the result shares memory with the tensor"


def random_scatters(mesh_ranks: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    mesh_shape = tuple(torch.tensor(mesh_ranks).shape)
    cases: list[tuple[Any, ...]] = []
    while len(cases) < count:
        shape = draw_shape(rng)
        placements = draw_placements(rng, shape, mesh_shape, ragged=0.8)
        if has_custom(placements):
            cases.append((mesh_ranks, shape, placements, rng.choice((0, None, min(mesh_shape) - 1)), len(cases)))
    return run_cases(scatter_and_compare, cases)


@pytest.mark.parametrize(
    "mesh_ranks", [(0, 1, 2, 3), ((3, 1), (2, 0)), (1, 3), (((0, 1), (2, 3)), ((4, 5), (6, 7)))], ids=str
)
def test_distribute_tensor(ranks: RankPools, mesh_ranks: Any) -> None:
    world_size = max(4, torch.tensor(mesh_ranks).numel())
    ranks.run(random_scatters, mesh_ranks, 3, 60, world_size=world_size)


def scatter_bytes() -> None:
    """The source sends every rank its part only."""
    mesh = make_mesh((0, 1, 2, 3))
    whole = sample((12, 5), torch.float32, 0)
    for placement in (RaggedShard((0,), (1, 0, 8, 3)), InterleavedShard(0, 3)):
        with record_comms() as ledger:
            placed = distribute_tensor(whole, mesh, (placement,))
        received = 0 if dist.get_rank() == 0 else local(placed).numel() * 4
        assert ledger.count() == 1 and ledger.bytes() == received
        with record_comms() as ledger:
            distribute_tensor(whole, mesh, (placement,), src_data_rank=None)
        assert ledger.count() == 0


def test_distribute_tensor_sends_parts(ranks: RankPools) -> None:
    ranks.run(scatter_bytes, world_size=4)


def reductions_scatter() -> None:
    """Partial -> sharded sends (n - 1)/n of the tensor, in one reduce-scatter; never a gather, never an all-reduce."""
    mesh = make_mesh((0, 1, 2, 3))
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for target in (
            RaggedShard((0,), (3, 3, 3, 3)),
            RaggedShard((0,), (0, 7, 1, 4)),
            RaggedShard((0, 1), (9, 1, 30, 20)),
            RaggedShard((), (0, 0, 1, 0)),
            InterleavedShard(0, 3),
            InterleavedShard(1, 2),
        ):
            tensor = Source(mesh, (12, 5), (Partial(),), dtype, seed=5)
            before = tensor.dtensor()
            with record_comms() as ledger:
                after = redistribute(before, placements=(target,))
            tensor.check(local(after), (target,), str(target))
            assert [r.op for r in ledger.records] == ["reduce_scatter_v"]
            sent = (60 - local(after).numel()) * dtype.itemsize
            assert ledger.bytes() == sent and ledger.records[0].padding_bytes == 0
            if sum(target.local_units if isinstance(target, RaggedShard) else (1,)) == 12 and rank == 0:
                assert sent <= 60 * dtype.itemsize
        even = Source(mesh, (12, 5), (Partial(),), dtype, seed=5).dtensor()
        with record_comms() as ledger:
            redistribute(even, placements=(RaggedShard((0,), (3, 3, 3, 3)),))
        assert ledger.bytes() == 60 * dtype.itemsize * 3 // 4


def test_partial_to_sharded_is_a_reduce_scatter(ranks: RankPools) -> None:
    ranks.run(reductions_scatter, world_size=4)


def many_reductions() -> None:
    """On two axes: the shard-like cut first, the ragged one last, so that each moves less than the one before."""
    mesh = make_mesh(((0, 1), (2, 3)))
    for source, target, expected in (
        ((Partial(), Partial()), (RaggedShard(), Shard(0)), ["reduce_scatter_v"] * 2),
        ((Partial(), Partial()), (RaggedShard(), Replicate()), ["reduce_scatter_v", "all_reduce"]),
        ((Partial(), Shard(0)), (RaggedShard(), Shard(0)), ["reduce_scatter_v"]),
        ((Partial(), Shard(0)), (InterleavedShard(0, 4), Shard(0)), ["reduce_scatter_v", "all_to_all_v"]),
        ((Partial(), RaggedShard()), (Replicate(), RaggedShard()), ["all_reduce"]),
        ((Partial(), RaggedShard()), (Shard(1), Replicate()), ["all_reduce", "all_to_all_v"]),
    ):
        source = normalize_placements(source, (8, 6), mesh)
        tensor = Source(mesh, (8, 6), source, torch.float64, seed=9)
        with record_comms() as ledger:
            after = redistribute(tensor.dtensor(), placements=target)
        tensor.check(local(after), after.placements, f"{source} -> {target}")
        assert [r.op for r in ledger.records] == expected, f"{source} -> {target}: {ledger}"
        received = 2 * 48 * 8 if "all_reduce" in expected else 48 * 8
        assert ledger.bytes() <= received, f"{source} -> {target}: {ledger}"


def test_reductions_on_two_axes(ranks: RankPools) -> None:
    ranks.run(many_reductions, world_size=4)


def other_partials() -> None:
    """Partials that know how to reduce themselves (norms), and product."""
    mesh = make_mesh((0, 1, 2, 3))
    whole = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
    target = RaggedShard((0,), (2, 0, 3, 1))
    for partial, logical in (
        (_NormPartial(2), torch.linalg.vector_norm(torch.stack([whole * (r + 1) for r in range(4)]), 2, dim=0)),
        (Partial("product"), whole**4 * 24),
    ):
        placed = from_local(whole * (dist.get_rank() + 1), mesh, (partial,), shape=(6, 2), stride=(2, 1))
        moved = redistribute(placed, placements=(target,))
        expected = oracle.local_tensor(logical, (target,), (4,), mesh.get_coordinate())
        torch.testing.assert_close(local(moved), expected)


def test_other_partials(ranks: RankPools) -> None:
    ranks.run(other_partials, world_size=4)


def odd_locals() -> None:
    """Locals that are not plain contiguous memory: transposed, strided, conjugated, negated, of zero strides."""
    mesh = make_mesh((0, 1, 2))
    rank = dist.get_rank()
    target = RaggedShard((0, 1), (5, 0, 31))
    whole = torch.arange(36.0).reshape(9, 4)
    rows = whole[rank * 3 : rank * 3 + 3]
    wide = torch.full((3, 8), -1.0)
    wide[:, ::2] = rows
    plain = redistribute(from_local(rows, mesh, (InterleavedShard(0, 1),), shape=(9, 4)), placements=(target,))
    for same in (rows.t().contiguous().t(), wide[:, ::2]):
        assert not same.is_contiguous()
        for source in (InterleavedShard(0, 1), Shard(0)):
            moved = redistribute(from_local(same, mesh, (source,), shape=(9, 4), stride=(4, 1)), placements=(target,))
            assert torch.equal(local(moved), local(plain))
    flat = local(plain)
    spread = torch.full((2 * flat.numel(),), -1.0)
    spread[::2] = flat
    ragged = from_local(spread[::2], mesh, (target,), shape=(9, 4))
    assert torch.equal(ragged.full_tensor(), whole)
    columns = [[0, 2], [1, 3], []][rank]
    assert torch.equal(local(redistribute(ragged, placements=(InterleavedShard(1, 2),))), whole[:, columns])
    ones = from_local(torch.ones(()).expand(9, 4), mesh, (Partial(),), shape=(9, 4), stride=(4, 1))
    assert torch.equal(local(redistribute(ones, placements=(target,))), torch.full((flat.numel(),), 3.0))
    complex_whole = torch.complex(whole, -whole)
    for source, part in (
        (Replicate(), complex_whole),
        (InterleavedShard(0, 1), complex_whole[rank * 3 : rank * 3 + 3]),
    ):
        for lazy in (part.conj(), part.conj().imag):
            moved = redistribute(
                from_local(lazy, mesh, (source,), shape=(9, 4), stride=(4, 1)), placements=(target,)
            ).full_tensor()
            expected = complex_whole.conj() if lazy.is_complex() else whole
            assert torch.equal(moved, expected)


def test_locals_of_any_memory(ranks: RankPools) -> None:
    ranks.run(odd_locals, world_size=3)


class Allocations(TorchDispatchMode):
    """The largest storage, in elements, that operators return and that was not there before."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known = {known.untyped_storage()._cdata}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // 8)
        return out


def sharded_to_sharded() -> None:
    mesh = make_mesh((0, 1, 2, 3))
    forms = all_forms(4, (16, 12), seed=2)[:11]  # the sharded ones
    for source in forms:
        for target in forms:
            if not has_custom((source, target)) or isinstance(source, Replicate):
                continue
            tensor = Source(mesh, (16, 12), (source,), torch.float64, seed=3)
            before = tensor.dtensor()
            with Allocations(local(before)) as allocations:
                after = redistribute(before, placements=(target,))
            bound = max(local(before).numel(), local(after).numel()) + 4  # sizes, ranks and the like
            assert allocations.largest <= bound, (
                f"{source} -> {target}: {allocations.largest} elements, {bound} expected"
            )


def test_no_full_size_temporaries(ranks: RankPools) -> None:
    """Between sharded placements no tensor is larger than the larger of the rank's two local tensors."""
    ranks.run(sharded_to_sharded, world_size=4)
