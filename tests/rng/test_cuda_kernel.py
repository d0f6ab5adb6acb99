"""The source of the CUDA kernel, compiled for the host: its arithmetic, and which blocks of Philox it makes."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from tests.rng import cases
from tests.rng.emulated_gpu import COINS, NORMAL, SMALL, STATE, UNIFORM, EmulatedGpu, no_kernel
from vescale import csrc
from vescale.placements import RaggedShard, local_region
from vescale.rng import _cuda_engine
from vescale.rng._cuda_engine import Device, NativeFill, generate
from vescale.rng._philox import GridStride, PhiloxRule, Quads, Vectors, philox
from vescale.rng._random_ops import DROPOUT_MASK, Fill, RandomOp
from vescale.rng._stream_spans import Piece, Span, spans

pytestmark = pytest.mark.helper("philox")


@pytest.fixture
def host_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_cuda_engine, "KERNEL_COST", 0)  # preferred wherever it may be used
    return EmulatedGpu(SMALL).device.kernel


def bounds_of(op: RandomOp, dtype: torch.dtype) -> tuple[int, int]:
    """(least, one more than the largest) that ``random_`` draws, by its documentation."""
    digits = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
    if dtype == torch.bool:
        largest = 1
    else:
        largest = 2 ** digits[dtype] if dtype in digits else torch.iinfo(dtype).max
    least, *high = (0, *op.arguments) if len(op.arguments) == 1 else op.arguments or (0,)
    return least, high[0] if high and high[0] is not None else largest + 1


def reference_values(op: RandomOp, rule: Any, n: int, dtype: torch.dtype, parameter: Any) -> torch.Tensor:
    """One element after the other from the formulas, in Python and numpy scalars; float32 where the device has it."""
    thread, block, lane = rule.address(SMALL, n, np.arange(n))
    words = philox(STATE, thread, block)
    at = np.arange(n)
    if isinstance(rule, GridStride) and rule.unroll == 2:
        low, high = words[at, 2 * lane].astype(object), words[at, 2 * lane + 1].astype(object)
        if op.name == "random_":
            base, bound = bounds_of(op, dtype)
            return torch.tensor([((a << 32) | b) % (bound - base) + base for a, b in zip(low, high, strict=True)]).to(
                dtype
            )
        unit = torch.tensor(
            [(a ^ (b << 21)) * 2.0**-53 + 2.0**-54 for a, b in zip(low, high, strict=True)], dtype=dtype
        )
    else:
        raw = words[at, lane]
        if op.name == "random_":
            base, bound = bounds_of(op, dtype)
            return torch.from_numpy((raw.astype(np.int64) % (bound - base)) + base).to(dtype)
        unit = torch.from_numpy(raw.astype(np.float32)) * 2.0**-32 + 2.0**-33
    if parameter is not None:
        return (unit.double() <= (parameter.double() if dtype == torch.float64 else parameter.float().double())).to(
            dtype
        )
    if op.name == "bernoulli_":
        return (unit < op.arguments[0]).to(dtype)
    if op.name == DROPOUT_MASK:
        return unit.double() < 1.0 - op.arguments[0] if op.dtype == torch.float64 else unit < 1.0 - op.arguments[0]
    low_, high_ = (torch.tensor(value, dtype=dtype) for value in op.arguments)
    scale = (high_ - low_).to(unit.dtype)
    values = (
        (unit.double() * scale.double() + low_.double()).to(unit.dtype).to(dtype)
    )  # one rounding: a fused multiply-add
    return torch.where(values == high_, low_, values)


@pytest.mark.parametrize("n", [300, 9_216])
@pytest.mark.parametrize(
    ("op", "dtype", "rule"),
    [
        (RandomOp("bernoulli_", (0.3,)), torch.float32, GridStride(4)),
        (RandomOp("bernoulli_", (0.3,)), torch.bool, GridStride(4)),
        (RandomOp("bernoulli_", (0.25,)), torch.float64, GridStride(2)),
        (RandomOp("random_", (-5, 100)), torch.int64, GridStride(4)),
        (RandomOp("random_", (0, 200)), torch.bfloat16, GridStride(4)),
        (RandomOp("random_", (0, 1500)), torch.float16, GridStride(4)),
        (RandomOp("random_", (3, 2**40)), torch.int64, GridStride(2)),
        (RandomOp("random_", (9,)), torch.int32, GridStride(4)),
        (RandomOp("random_", (0, 2**11 + 1)), torch.float16, GridStride(4)),
        (RandomOp("random_", (7, None)), torch.int64, GridStride(2)),
        (RandomOp("random_"), torch.int64, GridStride(2)),
        (RandomOp("random_"), torch.float64, GridStride(2)),
        (RandomOp("random_"), torch.float32, GridStride(4)),
        (RandomOp("random_"), torch.bfloat16, GridStride(4)),
        (RandomOp("random_"), torch.int32, GridStride(4)),
        (RandomOp("random_"), torch.int8, GridStride(4)),
        (RandomOp("random_"), torch.bool, GridStride(4)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.bfloat16), torch.bool, Vectors(8)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.float32), torch.bool, Vectors(4)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.float64), torch.bool, Vectors(2)),
        (RandomOp(DROPOUT_MASK, (0.3, True), torch.float32), torch.bool, Vectors(1)),
        (RandomOp("uniform_", (0.0, 1.0)), torch.float32, GridStride(4)),
        (RandomOp("uniform_", (0.0, 1.0)), torch.float64, GridStride(2)),
        (RandomOp("uniform_", (0.0, 1.0)), torch.bfloat16, GridStride(4)),
        (RandomOp("uniform_", (0.0, 3.0)), torch.float16, GridStride(4)),
        (RandomOp("bernoulli_"), torch.float32, Quads()),
        (RandomOp("bernoulli_"), torch.uint8, Quads()),
    ],
)
def test_kernel_source_on_the_host(host_kernel: Any, op: RandomOp, dtype: torch.dtype, rule: Any, n: int) -> None:
    """The arithmetic of the kernel, on boxes of a tensor, without a GPU (transcendental functions aside)."""
    shape, rule = (n // 12, 3, 4), rule.at(n)
    parameter = torch.rand(n, generator=torch.Generator().manual_seed(1)) if op == COINS else None
    expected = reference_values(op, rule, n, dtype, parameter).view(shape)
    device = Device(SMALL, no_kernel, host_kernel)
    for placements in ([Shard(0)], [Shard(1)], [Shard(2)], [RaggedShard((0, 1))]):
        for index in range(2):
            region = local_region(shape, placements, (2,), (index,))
            local = torch.empty(region.local_shape, dtype=dtype)
            given = None if parameter is None else cases.part_of(parameter.view(shape), region)
            contiguous = len(list(region.runs())) == 1
            if not isinstance(rule, Quads) and contiguous and n >= SMALL.max_threads:
                continue  # the engine prefers native chunks
            generate(local, Fill(op, region, (12, 4, 1)), STATE, device, rule, given)
            assert torch.equal(local, cases.part_of(expected, region)), (placements, index)


@pytest.mark.parametrize(("dtype", "rule"), [(torch.float32, GridStride(4)), (torch.float64, GridStride(2))])
def test_normals_of_the_kernel_source(host_kernel: Any, dtype: torch.dtype, rule: Any) -> None:
    n = 40_000
    local = torch.empty(n // 2, 1, dtype=dtype)
    region = local_region((n // 2, 2), [Shard(1)], (2,), (1,))
    device = Device(SMALL, no_kernel, host_kernel)
    generate(local, Fill(RandomOp("normal_", (1.0, 2.0)), region, (2, 1)), STATE, device, rule)
    assert abs(local.mean().item() - 1.0) < 0.05 and abs(local.std().item() - 2.0) < 0.05
    thread, block, lane = rule.address(SMALL, n, np.array([2 * 7 + 1]))
    words = [int(w) for w in philox(STATE, thread, block)[0]]
    if dtype == torch.float64:
        u = (words[0] ^ words[1] << 21) * 2.0**-53 + 2.0**-54
        angle = 2 * math.pi * ((words[2] ^ words[3] << 21) * 2.0**-53 + 2.0**-54)
    else:
        first = int(lane[0]) & 2
        u, angle = words[first] * 2.0**-32 + 2.0**-33, 2 * math.pi * (words[first + 1] * 2.0**-32 + 2.0**-33)
    expected = math.sqrt(-2 * math.log(u)) * (math.cos(angle) if int(lane[0]) & 1 else math.sin(angle)) * 2 + 1
    assert abs(local[7].item() - expected) < 1e-5


@pytest.mark.parametrize(("dtype", "rule"), [(torch.float32, GridStride(4)), (torch.float64, GridStride(2))])
def test_continuous_distributions_of_the_kernel_source(host_kernel: Any, dtype: torch.dtype, rule: Any) -> None:
    """Up to the roundings of the functions that a GPU has its own of."""
    n = 600
    thread, block, lane = rule.address(SMALL, n, np.arange(n))
    words = philox(STATE, thread, block).astype(np.uint64)
    at = np.arange(n)
    if dtype == torch.float64:
        unit = (words[at, 2 * lane] ^ words[at, 2 * lane + 1] << np.uint64(21)) * 2.0**-53 + 2.0**-54
    else:
        unit = words[at, lane] * 2.0**-32 + 2.0**-33

    def filled(name: str, *arguments: float) -> Any:
        local = torch.empty(n, dtype=dtype)
        op = RandomOp(name, arguments)
        span = Span(0, n, (Piece((n,), 0, (1,), 0, (1,)),))
        assert host_kernel(NativeFill(op, rule, n, STATE), local, [span], None)
        return local.double().numpy()

    close = {"rtol": 1e-3 if dtype == torch.float32 else 1e-12, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
    assert np.allclose(filled("exponential_", 1.5), -np.log(unit) / 1.5, **close)
    assert np.allclose(filled("cauchy_", 0.5, 2.0), 0.5 + 2 * np.tan(np.pi * (unit - 0.5)), **close)
    assert np.allclose(filled("log_normal_", 0.5, 0.25), np.exp(filled("normal_", 0.5, 0.25)), **close)


def blocks_made() -> int:
    library = csrc.load("philox")
    assert library is not None
    library.philox_blocks_made.restype = ctypes.c_uint64
    return int(library.philox_blocks_made())


@pytest.mark.parametrize(
    ("op", "dtype", "rule"),
    [
        (RandomOp("uniform_", (-0.5, 2.0)), torch.float32, GridStride(4)),
        (RandomOp("normal_", (0.5, 2.0)), torch.bfloat16, GridStride(4)),
        (RandomOp("normal_", (0.5, 2.0)), torch.float64, GridStride(2)),
        (RandomOp("random_"), torch.uint8, GridStride(4)),
        (RandomOp("random_", (-5, 2**40)), torch.int64, GridStride(2)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.float64), torch.bool, Vectors(2)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.float32), torch.bool, Vectors(4)),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.bfloat16), torch.bool, Vectors(8)),
        (RandomOp(DROPOUT_MASK, (0.3, True), torch.float32), torch.bool, Vectors(1)),
        (RandomOp("bernoulli_"), torch.float32, Quads()),
    ],
)
def test_pieces_are_cut_from_the_whole_and_make_each_block_once(
    host_kernel: Any, op: RandomOp, dtype: torch.dtype, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shape: passes that end within rows, rows shorter than four, local tensors of any strides."""
    rng = random.Random(f"{op} {dtype}")
    device = Device(SMALL, host_kernel.__self__.native, host_kernel)
    monkeypatch.setattr(_cuda_engine, "_prefers_kernel", lambda *_: True)
    for turn in range(24):
        monkeypatch.setattr(_cuda_engine, "_NARROW", 2**31 if turn % 4 else 0)
        shape = cases.random_shape(rng, 4, 3_000)
        shape = (shape[0] * rng.choice((1, 1, 40)), *shape[1:])
        n = math.prod(shape)
        order = tuple(range(len(shape))) if op == COINS else cases.random_memory_order(rng, len(shape))
        strides = cases.empty_in_order(shape, order, dtype).stride()
        parameter = torch.rand(shape, generator=torch.Generator().manual_seed(n)) if op == COINS else None
        whole = torch.empty(shape, dtype=dtype).as_strided(shape, strides)
        device.native(op, whole, STATE, parameter)
        mesh, placements = cases.random_placements(rng, shape, rng.choice((2, 3, 4, 8)))
        for coordinate in cases.coordinates(mesh):
            region = local_region(shape, placements, mesh, coordinate)
            holes = torch.zeros([2 * size for size in region.local_shape], dtype=dtype)
            memory = torch.full((region.numel + 32,), 1, dtype=dtype)
            local = rng.choice(
                (
                    memory[16 : 16 + region.numel].view(region.local_shape),
                    holes[tuple(slice(None, None, 2) for _ in region.local_shape)],
                )
            )
            given = None if parameter is None else cases.part_of(parameter, region)
            host_kernel.__self__.trusts(op, rule.at(n), local, given)
            blocks_made()
            fill = Fill(op, region, strides)
            generate(local, fill, STATE, device, rule, given)
            made = blocks_made()
            assert torch.equal(local, cases.part_of(whole, region)), (shape, order, mesh, placements, coordinate)
            assert (memory[:16] == 1).all() and (memory[16 + region.numel :] == 1).all(), "nothing is written around it"
            assert made == sum(blocks_of(fill, rule.at(n), local)), (shape, order, mesh, placements, coordinate)


def blocks_of(fill: Fill, rule: PhiloxRule, local: torch.Tensor) -> Iterator[int]:
    """The number of blocks that each piece has elements of; where those are neighbours, of each run of the last dim."""
    n = fill.numel
    thread, block, _ = rule.address(SMALL, n, np.arange(n))
    passes_apart = isinstance(rule, GridStride) or rule == Vectors(1)
    for span in spans(fill.region, fill.order, local.stride(), n, n):
        for piece in span.pieces:
            elements = torch.arange(n).as_strided(piece.sizes, piece.span_strides, span.start + piece.span_offset)
            for run in elements.reshape((1, -1) if passes_apart else (-1, piece.sizes[-1])).tolist():
                yield len({(thread[element], block[element]) for element in run})


def test_blocks_are_shared_where_passes_are_whole_rows(host_kernel: Any) -> None:
    """Four numbers of each block for a quarter of the columns, as the native op makes them: 1,024 threads, 256 columns."""
    shape = (64, 256)
    region = local_region(shape, [Shard(1)], (4,), (1,))
    for op, dtype, rule, numbers in (
        (UNIFORM, torch.float32, GridStride(4), 4),
        (NORMAL, torch.bfloat16, GridStride(4), 4),
        (NORMAL, torch.float64, GridStride(2), 2),
        (RandomOp(DROPOUT_MASK, (0.3, False), torch.bfloat16), torch.bool, Vectors(8), 4),
    ):
        local = torch.empty(region.local_shape, dtype=dtype)
        host_kernel.__self__.trusts(op, rule, local, None)
        blocks_made()
        generate(local, Fill(op, region, (256, 1)), STATE, Device(SMALL, no_kernel, host_kernel), rule)
        assert blocks_made() == region.numel // numbers


def test_probabilities_are_rounded_as_the_native_op_rounds_them(host_kernel: Any) -> None:
    """To float32, unless the filled tensor is float64: a probability just below a number becomes that number."""
    words = philox(STATE, np.arange(75), np.zeros(75, np.int64)).reshape(-1)
    unit = torch.from_numpy(words.astype(np.float32)) * 2.0**-32 + 2.0**-33
    region = local_region((300,), [Shard(0)], (1,), (0,))
    for dtype, expected in ((torch.float32, 1.0), (torch.int32, 1.0), (torch.float64, 0.0)):
        local = torch.empty(300, dtype=dtype)
        device = Device(SMALL, no_kernel, host_kernel)
        generate(local, Fill(COINS, region, (1,)), STATE, device, Quads(), unit.double() * (1 - 1e-12))
        assert (local == expected).all()


def test_what_the_kernel_is_told() -> None:
    def plan(sizes: tuple[int, ...], strides: tuple[int, ...], n: int = 10**6) -> Any:
        piece = Piece(sizes, 0, strides, 0, strides)
        span = Span(0, n, (piece,))
        return _cuda_engine.plan_of(
            NativeFill(UNIFORM, GridStride(4), n, STATE), SMALL, torch.float32, None, span, piece
        )

    assert plan((5, 7), (7, 1)).count == 5 * 2
    assert plan((1,), (1,), n=2**31).kind[-1] == plan((1,), (1,), n=2**31 - 4096).kind[-1] == 0
    assert plan((1,), (1,), n=2**31 - 10_000).kind[-1] == 1
    # No boxes of a row-major tensor: places would be found where none are.
    assert plan((5, 7), (6, 1)) is None
    assert plan((5, 7), (14, 2)) is None
    assert plan((2,) * 7, (64, 32, 16, 8, 4, 2, 1)) is None


def test_division_by_multiplication() -> None:
    rng = random.Random(0)
    for value in [*range(1, 300), *(2**k + d for k in range(8, 31) for d in (-1, 0, 1)), 2**31 - 1]:
        by = _cuda_engine._divisor(value)
        assert by.value == value
        for x in (
            0,
            1,
            value - 1,
            value,
            value + 1,
            7 * value - 1,
            2**31 - 1,
            *(rng.randrange(2**31) for _ in range(20)),
        ):
            if x < 2**31:
                assert ((x * by.multiplier >> 32) + x) >> by.shift == x // value


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (RandomOp("random_", (0, 300)), torch.bfloat16),
        (RandomOp("random_", (-3_000, 5)), torch.float16),
        (RandomOp("random_", (0, 2**25)), torch.float32),
        (RandomOp("geometric_", (0.5,)), torch.int64),
    ],
)
def test_arguments_at_which_the_kernel_is_not_sure_are_left_to_the_native_op(op: RandomOp, dtype: torch.dtype) -> None:
    """Native ops move integer bounds that the dtype cannot hold."""
    assert _cuda_engine.transform_of(op, dtype, False) is None


def test_tensors_with_holes_are_measured_by_their_extent(host_kernel: Any) -> None:
    """Few elements, and more than 2 GiB from the first to the last: the native op splits them."""
    shape, device = (4, 8), Device(SMALL, no_kernel, host_kernel)
    region = local_region(shape, [Shard(0)], (2,), (0,))
    local = torch.empty(region.local_shape)
    generate(local, Fill(UNIFORM, region, (2**20, 1)), STATE, device, GridStride(4))
    with pytest.raises(NotImplementedError, match="holes between its elements"):
        generate(local, Fill(UNIFORM, region, (2**28, 1)), STATE, device, GridStride(4))
