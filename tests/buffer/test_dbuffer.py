"""DBuffer against plain tensors: what every rank holds, group operations, collectives in one call, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.simulate import simulate
from vescale.buffer import Allocation, DBuffer, TensorGroup, alignment_in_elements, check_same_buffers
from vescale.comm import record_comms
from vescale.errors import BufferMismatchError
from vescale.placements import RaggedShard, from_local

SHAPES = {"a": (5, 3), "empty": (0, 4), "b": (17,), "scalar": (), "c": (2, 3, 4), "one": (1,)}
BLOCKS = {"a": 3, "c": 12}


def group_of(num_shards: int, dtypes: Sequence[torch.dtype] = (torch.float32,), **options: Any) -> TensorGroup:
    return TensorGroup.plan(SHAPES, num_shards, dtypes=dtypes, blocks=BLOCKS, **options)


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-8, 9, shape, generator=generator).to(dtype)  # sums are exact in any order
        for name, shape in SHAPES.items()
    }


def filled(
    mesh: Any, placements: Sequence[Any], seed: int, dtype: torch.dtype = torch.float32, **options: Any
) -> DBuffer:
    buffer = DBuffer(group_of(mesh.size()), mesh, placements, dtype=dtype, **options).allocate()
    for name, value in values(seed, dtype).items():
        buffer.load(name, value)
    return buffer


def assert_holds(buffer: DBuffer, expected: dict[str, torch.Tensor]) -> None:
    for name, view in buffer.items():
        index = buffer.group.index(name)
        flat = expected[name].reshape(-1)
        begin = max(0, min(flat.numel(), buffer.begin - buffer.group.layout.offsets[index]))
        torch.testing.assert_close(view.reshape(-1), flat[begin : begin + view.numel()], rtol=0, atol=0)
    held = sum(view.numel() for view in buffer.views)
    total = sum(view.double().abs().sum() for view in buffer.views)
    assert buffer.local.double().abs().sum() == total  # padding is zero
    assert buffer.local.numel() == buffer.numel >= held


def test_alignment_counts_elements_of_every_dtype() -> None:
    assert alignment_in_elements([torch.float32]) == 4
    assert alignment_in_elements([torch.float32, torch.bfloat16]) == 8
    assert alignment_in_elements([torch.uint8, torch.float64], 32) == 32
    assert alignment_in_elements([torch.complex128], 8) == 1
    group = group_of(3, [torch.bfloat16], alignment_bytes=64)
    assert group.layout.shard_size % 32 == 0 and all(offset % 32 == 0 for offset in group.layout.offsets)


def test_group_errors() -> None:
    group = group_of(2)
    with pytest.raises(ValueError, match="two tensors of a group are named 'a'"):
        TensorGroup(("a",) * 6, group.shapes, group.layout)
    with pytest.raises(ValueError, match="plan the layout of these shapes"):
        TensorGroup(group.names, group.shapes[::-1], group.layout)
    with pytest.raises(KeyError, match="no tensor 'x' in this group of 6"):
        group.index("x")


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_slices_and_gaps_partition_the_buffer(num_shards: int) -> None:
    group = group_of(num_shards)
    layout = group.layout
    for pieces in {1, num_shards}:
        size, held = layout.buffer_size // pieces, dict.fromkeys(range(len(group)), 0)
        for piece in range(pieces):
            covered = [
                (part.local_offset, part.local_offset + part.end - part.begin)
                for part in group.slices(piece * size, (piece + 1) * size)
            ]
            covered = sorted(covered + group.gaps(piece * size, (piece + 1) * size))
            assert covered[0][0] == 0 and covered[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(covered))
            for part in group.slices(piece * size, (piece + 1) * size):
                assert part.begin == held[part.tensor]
                held[part.tensor] = part.end
        assert tuple(held.values()) == layout.numels


def hold(world: int) -> None:
    for shape, placements in (
        ((world,), [RaggedShard()]),
        ((world,), [Replicate()]),
        ((2, world // 2), [Replicate(), RaggedShard()]),
        ((2, world // 2), [RaggedShard(), Replicate()]),
        ((2, world // 2), [RaggedShard(), RaggedShard()]),
        ((2, world // 2), [None, RaggedShard()]),
    ):
        mesh = init_device_mesh(device_type(), shape)
        buffer = filled(mesh, placements, seed=1)
        assert_holds(buffer, values(1))
        if not buffer.shard_axes:
            assert {name: tuple(view.shape) for name, view in buffer.items()} == SHAPES
        if buffer.shard_axes == (0,) and mesh.ndim == 1:  # each tensor is a DTensor over a slice of the buffer
            for name, view in buffer.items():
                placed = from_local(view, mesh, [buffer.placement(name)], shape=SHAPES[name])
                assert placed.to_local().untyped_storage().data_ptr() == buffer.local.untyped_storage().data_ptr()
                assert torch.equal(placed.full_tensor(), values(1)[name])


def test_what_ranks_hold(ranks: RankPools) -> None:
    ranks.run(hold, 4, world_size=4)
    simulate(hold, 6, 6)


def collectives(shape: tuple[int, ...], sharded: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    """all_gather, reduce_scatter, all_reduce over ``sharded`` axes against values computed without communication."""
    mesh = init_device_mesh(device_type(), shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    fixed = [0 if axis in sharded else index for axis, index in enumerate(coordinate)]
    seeds = [
        100 * sum(c * 10**axis for axis, c in enumerate(place))
        for place in torch.cartesian_prod(*[torch.arange(n) for n in (*shape, 1)]).tolist()
        if all(axis in sharded or place[axis] == fixed[axis] for axis in range(mesh.ndim))
    ]
    own = 100 * sum(c * 10**axis for axis, c in enumerate(coordinate))
    each = [values(seed, dtype) for seed in seeds]
    reduced = {}
    for name in SHAPES:
        stacked = torch.stack([one[name] for one in each]).double()
        total = {"sum": stacked.sum(0), "avg": stacked.sum(0) / len(each), "max": stacked.amax(0)}[op]
        reduced[name] = total.to(dtype)
    placed = [RaggedShard() if axis in sharded else Replicate() for axis in range(mesh.ndim)]
    pending = [Partial(op) if axis in sharded else Replicate() for axis in range(mesh.ndim)]

    shard = filled(mesh, placed, seed=7, dtype=dtype)
    with record_comms() as ledger:
        whole = shard.all_gather(requester="unit").wait()
    count = math.prod(shape[axis] for axis in sharded)
    assert [(r.op, r.bytes, r.requester) for r in ledger.records] == [
        ("all_gather_v", (count - 1) * shard.num_bytes, "unit")
    ]
    assert_holds(whole, values(7, dtype))
    assert whole.placements == (Replicate(),) * mesh.ndim
    in_place = DBuffer(shard.group, mesh, [Replicate()] * mesh.ndim, dtype=dtype).allocate()
    part = in_place.piece(sharded).copy_(shard)
    assert part.local.data_ptr() == in_place.local[in_place.piece(sharded).begin :].data_ptr()
    part.all_gather(out=in_place).wait()
    assert_holds(in_place, values(7, dtype))

    for in_place_too in (False, True):
        gradients = filled(mesh, pending, seed=own, dtype=dtype)
        out = gradients.piece(sharded) if in_place_too else None
        with record_comms() as ledger:
            scattered = gradients.reduce_scatter(out=out).wait()
        assert [r.op for r in ledger.records] == ["reduce_scatter_v"]
        assert_holds(scattered, reduced)

    gradients = filled(mesh, pending, seed=own, dtype=dtype)
    address = gradients.local.data_ptr()
    result = gradients.all_reduce().wait()
    assert result.local.data_ptr() == address and result.placements == (Replicate(),) * mesh.ndim
    assert_holds(result, reduced)


CASES = [
    (shape, axes, dtype, op)
    for shape, axes in (((4,), (0,)), ((2, 2), (1,)), ((2, 2), (0,)), ((2, 2), (0, 1)))
    for dtype, op in ((torch.float32, "sum"), (torch.float32, "avg"), (torch.bfloat16, "sum"), (torch.float64, "max"))
]


def all_cases() -> int:
    return run_cases(collectives, CASES)


def test_collectives_of_the_whole_group(ranks: RankPools) -> None:
    assert ranks.run(all_cases, world_size=4) == [len(CASES)] * 4
    simulate(collectives, 6, (3, 2), (0, 1), torch.float32, "sum")


def partial_then_partial() -> None:
    """HSDP: reduce-scatter over the inner axis, accumulate, then all-reduce the pieces over the outer one."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    gradients = filled(mesh, [Partial(), Partial()], seed=rank)
    pieces = gradients.reduce_scatter(["shard"]).wait()
    assert isinstance(pieces.placements[0], Partial) and isinstance(pieces.placements[1], RaggedShard)
    pieces.add_(pieces.clone())
    result = pieces.all_reduce().wait()
    each = [values(seed) for seed in range(4)]
    assert_holds(result, {name: 2 * sum(one[name] for one in each) for name in SHAPES})  # type: ignore[misc]
    finest = DBuffer(result.group, mesh, [RaggedShard(), RaggedShard()], dtype=torch.float32).allocate()
    with pytest.raises(ValueError, match="are not consecutive in"):
        finest.all_gather(["replicate"])
    inner = finest.all_gather(["shard"]).wait()
    assert inner.numel == 2 * finest.numel and inner.all_gather(["replicate"]).wait().num_pieces == 1


def test_partial_on_two_axes(ranks: RankPools) -> None:
    ranks.run(partial_then_partial, world_size=4)


def operations() -> None:
    mesh = init_device_mesh(device_type(), (4,))
    for placements in ([RaggedShard()], [Replicate()]):
        x, y = filled(mesh, placements, 1), filled(mesh, placements, 2)
        half = y.to(torch.bfloat16)
        x.add_(half, alpha=0.5).mul_(3.0)
        a, b = values(1), values(2)
        assert_holds(x, {name: 3 * (a[name] + 0.5 * b[name]) for name in SHAPES})
        flat = torch.cat([value.reshape(-1) for value in b.values()])
        for order in (2.0, 1.0, 3.0, 0.0, math.inf):
            torch.testing.assert_close(y.norm(order), torch.linalg.vector_norm(flat, order))
        for name, value in b.items():
            y.load(name, value + 20)  # without zeros, so that negative orders would see the padding's
        for order in (-1.0, -2.0, -math.inf):
            torch.testing.assert_close(y.norm(order), torch.linalg.vector_norm(flat + 20, order))
        y.copy_(filled(mesh, placements, 2))
        torch.testing.assert_close(half.norm(), torch.linalg.vector_norm(flat))
        assert y.zero_().norm() == 0
    with pytest.raises(ValueError, match="must have the same layout and hold the same"):
        filled(mesh, [RaggedShard()], 1).add_(filled(mesh, [Replicate()], 1))
    with pytest.raises(ValueError, match="its sum is still pending"):
        filled(mesh, [Partial()], 1).norm()
    with pytest.raises(ValueError, match="they must be RaggedShard"):
        filled(mesh, [Replicate()], 1).all_gather()
    with pytest.raises(ValueError, match="planned for 2 shards"):
        DBuffer(group_of(4), init_device_mesh(device_type(), (2, 2)), [RaggedShard()] * 2, dtype=torch.float32)
        DBuffer(group_of(2), init_device_mesh(device_type(), (2, 2)), [RaggedShard()] * 2, dtype=torch.float32)
    with pytest.raises(ValueError, match="a tensor of shape"):
        x.load("a", torch.zeros(3, 5))


def test_group_operations(ranks: RankPools) -> None:
    ranks.run(operations, world_size=4)


class WholeBufferOps(TorchDispatchMode):
    """Names of the ops that read or write tensors of at least ``numel`` elements; views and allocations do neither."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_nothing = op._schema.name.startswith("aten::empty") or op.is_view or "set_" in op._schema.name
        large = any(isinstance(x, torch.Tensor) and x.numel() >= self.numel for x in args)
        if large and not makes_nothing and op is not torch.ops.aten.detach.default:
            self.found.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def one_kernel() -> None:
    """However many tensors there are, each operation of the group is one op on the flat local part."""
    mesh = init_device_mesh(device_type(), (2,))
    for placements in ([RaggedShard()], [Replicate()]):
        x, y = filled(mesh, placements, 1), filled(mesh, placements, 2)
        operations: dict[str, tuple[Callable[[], Any], str]] = {
            "add": (lambda x=x, y=y: x.add_(y, alpha=2.0), "add_"),
            "scale": (lambda x=x: x.mul_(0.5), "mul_"),
            "zero": (lambda x=x: x.zero_(), "zero_"),
            "copy": (lambda x=x, y=y: x.copy_(y), "copy_"),
            "cast": (lambda x=x: x.to(torch.bfloat16), "copy_"),
            "norm": (lambda y=y: y.norm(), "linalg_vector_norm"),
        }
        for name, (run, kernel) in operations.items():
            run()
            with WholeBufferOps(x.numel) as ops:
                run()
            assert ops.found == [kernel], (name, ops.found)


def test_operations_are_one_kernel(ranks: RankPools) -> None:
    ranks.run(one_kernel, world_size=2)


def memory() -> None:
    """Batched allocation, stable views, release, and saved tensors that survive a later gather."""
    mesh = init_device_mesh(device_type(), (2,))
    together = Allocation("cpu")
    group = group_of(2, (torch.float32, torch.bfloat16))
    wide = DBuffer(group, mesh, [Replicate()], dtype=torch.float32, allocation=together)
    narrow = DBuffer(group, mesh, [Replicate()], dtype=torch.bfloat16, allocation=together)
    assert not wide.is_allocated
    with pytest.raises(RuntimeError, match="never been allocated"):
        wide.local  # noqa: B018
    wide.allocate()
    assert narrow.is_allocated and together.storage.nbytes() == together.num_bytes >= wide.num_bytes + narrow.num_bytes
    with pytest.raises(RuntimeError, match="reserve all places before the first use"):
        DBuffer(group, mesh, [Replicate()], dtype=torch.float32, allocation=together)
    assert narrow.local.data_ptr() - wide.local.data_ptr() >= wide.num_bytes
    views, shapes = wide.views, [tuple(view.shape) for view in wide.views]
    wide.free()
    assert not narrow.is_allocated and together.storage.nbytes() == 0
    wide.allocate()
    assert wide.views is views and [tuple(view.shape) for view in views] == shapes
    weight = views[0].detach().requires_grad_()
    result = (weight * 2).exp().sum()
    version = weight._version
    wide.local.add_(1)  # a collective into the buffer
    assert weight._version == version
    result.backward()


def test_memory_is_shared_and_released(ranks: RankPools) -> None:
    ranks.run(memory, world_size=2)


def disagree(kind: str) -> str:
    mesh = init_device_mesh(device_type(), (4,))
    rank = dist.get_rank()
    described = {f"layer.{i}": group_of(4).layout.digest for i in range(3)}
    if kind == "digest" and rank == 2:
        described["layer.1"] = group_of(2).layout.digest
    if kind == "fewer" and rank == 3:
        del described["layer.2"]
    with record_comms() as ledger:
        try:
            check_same_buffers(described, mesh.get_group())
        except BufferMismatchError as error:
            assert ledger.count() == 2
            return str(error)
    assert ledger.count() == 1
    return ""


def test_ranks_that_planned_differently_all_raise(ranks: RankPools) -> None:
    assert ranks.run(disagree, "nothing") == [""] * 4
    for kind, name in (("digest", "layer.1"), ("fewer", "layer.2")):
        texts = ranks.run(disagree, kind)
        assert all("disagree on buffer" in text for text in texts), texts
        assert name in texts[0] and ("[2]" if kind == "digest" else "[3]") in texts[0]


def test_meta_buffers_have_shapes_only(ranks: RankPools) -> None:
    ranks.run(on_meta, world_size=2)


def on_meta() -> None:
    mesh = init_device_mesh(device_type(), (2,))
    buffer = DBuffer(group_of(2), mesh, [RaggedShard()], dtype=torch.float32, device="meta").allocate()
    assert buffer.local.is_meta and sum(view.numel() for view in buffer.views) <= buffer.numel
    placed = from_local(buffer["c"], mesh, [buffer.placement("c")], shape=SHAPES["c"])
    assert isinstance(placed, DTensor) and placed.shape == (2, 3, 4)
