"""Changes of placements that C++ runs give what Python gives, bit by bit: values, strides, dtypes, and specs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.device import device_type
from tests.examples import NIGHTLY, examples
from tests.ranks import RankPools
from vescale.comm import record_comms
from vescale.compat import extend_dtensor, is_native, local_of, make_dtensor, make_spec, spec_of
from vescale.compat.native_dispatch import without_native
from vescale.ops import _conversion, convert
from vescale.placements import InterleavedShard, contiguous_stride, native_move, own_region

Placements = tuple[Placement, ...]
P, R, S0, S1, S2 = Partial(), Replicate(), Shard(0), Shard(1), Shard(2)
AVG, MAX = Partial("avg"), Partial("max")
STRIDED = _StridedShard(0, split_factor=2)
# Even, uneven with padding that is small enough, uneven, with empty shards, empty, without dims.
SHAPES = ((8, 4, 4), (8, 7, 3), (5, 6, 3), (3, 2, 9), (0, 4, 4), (4,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)


@contextmanager
def without_python() -> Iterator[None]:
    """Changes of placements that Python runs are errors."""

    def refused(*args: Any) -> Any:
        raise AssertionError(f"Python moves {args[3]} -> {args[4]} of {args[2]}")

    before, _conversion.move_local = _conversion.move_local, refused  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _conversion.move_local = before  # type: ignore[attr-defined]


def made(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...], dtype: torch.dtype, order: int) -> DTensor:
    """Row-major, with its dims in the reverse order in memory, or with gaps."""
    region = own_region(shape, placements, mesh)
    assert region is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    held = region.local_shape
    values = torch.randint(1, 9, (*held, 2), generator=generator)
    local = (values[..., 0] / 8 if dtype.is_floating_point or dtype.is_complex else values[..., 0]).to(dtype)
    if order == 1:
        local = local.permute(*reversed(range(len(held)))).contiguous().permute(*reversed(range(len(held))))
    elif order == 2:
        local = torch.stack([local, local], -1)[..., 0]
    return make_dtensor(local, make_spec(mesh, placements, shape, contiguous_stride(shape), dtype))


def compare(x: DTensor, target: Placements, observed_rank: int) -> bool:
    """Whether C++ makes it; on a rank that observes collectives, Python does."""
    spec = spec_of(x)
    is_native = native_move(spec.mesh, x.shape, spec.placements, target, x.dtype) is not None
    context = record_comms() if dist.get_rank() == observed_rank else without_python() if is_native else nullcontext()
    found: list[DTensor | str] = []
    for case in (without_native(), context):
        with case, torch.no_grad():
            try:
                found.append(convert(x, target))
            except ValueError as error:
                found.append(str(error))
    a, b = found
    if isinstance(a, str) or isinstance(b, str):
        assert a == b, (a, b)
        return False
    assert spec_of(a) == spec_of(b)
    first, second = local_of(a), local_of(b)
    assert first.stride() == second.stride() and first.dtype == second.dtype and first.shape == second.shape
    assert torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())
    same = second.untyped_storage().data_ptr() == local_of(x).untyped_storage().data_ptr()
    assert same == (spec.placements == target) or not second.numel()
    return is_native


def pairs_of(mesh_shape: tuple[int, ...], kinds: Placements, count: int | None) -> tuple[int, int]:
    """Pairs of placements (all for None), with some of the shapes, dtypes and orders in memory."""
    extend_dtensor()
    mesh = init_device_mesh(device_type(), mesh_shape)
    draw = random.Random(str(mesh_shape))
    every = list(itertools.product(kinds, repeat=len(mesh_shape)))
    pairs = list(itertools.product(every, every))
    native, total = 0, 0
    for source, target in pairs if count is None else draw.sample(pairs, count):
        if len({p.reduce_op for p in (*source, *target) if isinstance(p, Partial)}) > 1:
            continue
        for shape in draw.sample(SHAPES, NUM_SHAPES if count is None else 1):
            if any(getattr(p, "dim", 0) >= len(shape) for p in (*source, *target)):
                continue
            dtype = draw.choice(DTYPES)
            total += 1
            try:
                native += compare(made(mesh, source, shape, dtype, draw.randrange(3)), target, draw.randrange(6))
            except AssertionError as error:
                raise AssertionError(f"{source} -> {target} of {shape} {dtype}: {error}") from error
    return native, total


NUM_SHAPES = len(SHAPES) if NIGHTLY else 2
KINDS = (R, P, AVG, MAX, S0, S1, S2, InterleavedShard(1, 2))
PAIRS: list[tuple[tuple[int, ...], Placements, int | None]] = [
    ((4,), KINDS, None),
    ((2, 2), (*KINDS, STRIDED), examples(400)),
    ((2, 1, 2), KINDS, examples(400)),
    ((1, 4), KINDS, examples(60)),
]


@pytest.mark.helper("dispatch")
def test_moves_equal_pythons(ranks: RankPools) -> None:
    for case in PAIRS:
        results = ranks.run(pairs_of, *case, world_size=4)
        assert len(set(results)) == 1  # ranks agree on what C++ runs
        native, total = results[0]
        assert native > 0.6 * total, (case, results)


def unexpected_locals() -> None:
    """What a spec says and what a local tensor is may differ: ``from_local`` believes its caller."""
    extend_dtensor()
    assert is_native()
    mesh = init_device_mesh(device_type(), (2,))
    for local in (
        torch.ones(3, 5),
        torch.ones(6, 5, dtype=torch.float64),
        torch.ones(6, 5, dtype=torch.complex64).conj(),
    ):
        dtype = local.dtype if local.is_complex() else torch.float32
        x = make_dtensor(local, make_spec(mesh, (P,), (6, 5), (5, 1), dtype))
        for _ in range(2):
            made = convert(x, (R,))
            assert torch.equal(local_of(made), 2 * local) and local_of(made).dtype == local.dtype
    x = make_dtensor(torch.ones(2, 5), make_spec(mesh, (S0,), (6, 5), (5, 1), torch.float32))
    with pytest.raises(RuntimeError):  # Python's error
        convert(x, (S1,))


@pytest.mark.helper("dispatch")
def test_unexpected_locals(ranks: RankPools) -> None:
    ranks.run(unexpected_locals, world_size=2)
