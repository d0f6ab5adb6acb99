"""The CUDA engine on an emulated device: addresses against a literal simulation of the kernels' loops.

What needs a GPU is under the ``gpu`` mark at the end (and in benchmarks/gpu.py).
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from tests.rng import cases
from tests.rng.emulated_gpu import COINS, NORMAL, SMALL, STATE, UNIFORM, EmulatedGpu, no_kernel
from vescale.placements import InterleavedShard, RaggedShard, local_region
from vescale.rng import _cuda_engine
from vescale.rng._cuda_engine import Device, Plan, generate
from vescale.rng._philox import GridStride, Launch, PhiloxRule, PhiloxState, Quads, Vectors, leaves, philox
from vescale.rng._random_ops import DROPOUT_MASK, Fill, RandomOp


def word(state: PhiloxState, thread: int, block: int, lane: int) -> int:
    return int(philox(state, np.array([thread]), np.array([block]))[0, lane])


def simulated_grid_stride(launch: Launch, n: int, unroll: int) -> dict[int, tuple[int, int, int]]:
    """The loops of ``distribution_elementwise_grid_stride_kernel``, thread by thread: element -> its address."""
    grid = min(launch.num_sms * (launch.threads_per_sm // 256), -(-n // 256))
    found = {}
    for thread in range(256 * grid):
        block = 0
        start = thread
        rounded = ((n - 1) // (256 * grid * unroll) + 1) * 256 * grid * unroll
        while start < rounded:
            for lane in range(unroll):
                element = start + 256 * grid * lane
                if element < n:
                    found[element] = (thread, block, lane)
            block += 1
            start += 256 * grid * unroll
    return found


def simulated_vectors(launch: Launch, n: int, width: int) -> dict[int, tuple[int, int, int]]:
    """The loops of the vectorized dropout kernel: ``width`` neighbours at a time, four words a draw."""
    threads = 256 * min(launch.num_sms * (launch.threads_per_sm // 256), -(-n // 256))
    found = {}
    for thread in range(threads):
        block = 0
        for first in range(thread * width, n, threads * width):
            for place in range(width):
                found[first + place] = (thread, block + place // 4, place % 4)
            block += max(1, width // 4)
    return found


@pytest.mark.parametrize("n", [1, 255, 257, 1023, 1024, 1025, 4096, 4097, 9_999])
@pytest.mark.parametrize("rule", [GridStride(4), GridStride(2), Vectors(4), Vectors(2), Vectors(8), Quads()])
def test_addresses_are_those_of_the_loops(rule: PhiloxRule, n: int) -> None:
    if isinstance(rule, Vectors):
        n = -(-n // rule.width) * rule.width
        expected = simulated_vectors(SMALL, n, rule.width)
    elif isinstance(rule, GridStride):
        expected = simulated_grid_stride(SMALL, n, rule.unroll)
    else:
        expected = {i: (i // 4, 0, i % 4) for i in range(n)}
    assert len(expected) == n
    thread, block, lane = rule.address(SMALL, n, np.arange(n))
    assert {i: (int(thread[i]), int(block[i]), int(lane[i])) for i in range(n)} == expected


def test_known_answers_of_philox() -> None:
    """The published vectors of Random123 (counter and key all zeros, all ones, digits of pi)."""
    ones = 2**64 - 1
    for seed, thread, block, answer in (
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ones, ones, ones, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = philox(PhiloxState(seed, 0), np.array([thread], np.uint64), np.array([block], np.uint64))[0]
        assert " ".join(f"{w:08x}" for w in words) == answer


def test_large_fills_split_as_torch_splits_them() -> None:
    assert list(leaves(10, 4)) == [(0, 10)]
    assert list(leaves(2**29, 4)) == [(0, 2**29)]  # 2 GiB of bytes: the last offset is 2^31 - 4
    assert list(leaves(2**29 + 2, 4)) == [(0, 2**28 + 1), (2**28 + 1, 2**29 + 2)]
    assert [b - a for a, b in leaves(2**32 + 1, 1)] == [2**30] * 3 + [2**30 + 1]


# --- the engine, with an emulation of the native ops in the place of the device


def emulated_native(launch: Launch, rule_of: Any) -> Any:
    """Writes word numbers instead of values: what counts is that every element comes from the right address."""

    def native(op: Any, out: torch.Tensor, state: PhiloxState, parameter: Any = None, final: Any = None) -> None:
        n = out.numel()
        rule = rule_of(n)
        if n:
            thread, block, lane = rule.address(launch, n, np.arange(n))
            words = philox(state, thread, block)[np.arange(n), lane]
            order = sorted(range(out.dim()), key=lambda d: -out.stride(d))
            stream = torch.from_numpy(words.astype(np.int64)).view([out.shape[d] for d in order])
            out.copy_(stream.permute(sorted(range(len(order)), key=order.__getitem__)))
        if final is not None:
            final.append(PhiloxState(state.seed, state.offset + (rule.increment(launch, n) if n else 0)))

    return native


def fills(rng: random.Random, max_numel: int) -> Iterator[tuple[Any, ...]]:
    for _ in range(120):
        first, *rest = cases.random_shape(rng, 4)
        shape = (first * rng.choice((1, max(1, max_numel // max(1, first * math.prod(rest))))), *rest)
        order = cases.random_memory_order(rng, len(shape))
        yield shape, order, *cases.random_placements(rng, shape, rng.choice((2, 3, 4, 8)))


@pytest.mark.parametrize("name", ["unroll 4", "unroll 2", "dropout float32", "dropout bfloat16"])
def test_native_chunks_give_every_coordinate_its_elements(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(num_sms=1, threads_per_sm=256)  # 256 threads, so that small tensors take several passes
    widest = {"dropout float32": Vectors(4), "dropout bfloat16": Vectors(8)}
    rule: Any = widest.get(name, GridStride(4 if name == "unroll 4" else 2))
    device = Device(launch, emulated_native(launch, rule.at), no_kernel)
    monkeypatch.setattr(_cuda_engine, "GAP_ELEMENTS", 50)
    rng = random.Random(name)
    passes = 0
    for shape, order, mesh, placements in fills(rng, 9_000):
        whole = cases.empty_in_order(shape, order, torch.int64)
        final: list[PhiloxState] = []
        device.native(None, whole, STATE, None, final)
        passes += whole.numel() > 2 * rule.chunk(launch)
        for coordinate in cases.coordinates(mesh):
            region = local_region(shape, placements, mesh, coordinate)
            local = torch.full(region.local_shape, -1)
            op = RandomOp("uniform_", (0.0, 1.0))
            left = generate(local, Fill(op, region, whole.stride()), STATE, device, rule)
            assert torch.equal(local, cases.part_of(whole, region)), (shape, order, mesh, placements, coordinate)
            assert left == final[0]
    assert passes > 10


def refused_kernel(*_: Any) -> bool:
    raise AssertionError("the kernel counts the elements of one launch")


def test_fills_of_more_than_two_gib_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit of 32-bit offsets lowered to something that fits a test."""
    launch = Launch(num_sms=1, threads_per_sm=256)
    rule = GridStride(4)

    def small_leaves(n: int, itemsize: int) -> Iterator[tuple[int, int]]:
        def split(start: int, stop: int) -> Iterator[tuple[int, int]]:
            if stop - start <= 3_000:
                yield start, stop
            else:
                yield from split(start, start + (stop - start) // 2)
                yield from split(start + (stop - start) // 2, stop)

        return split(0, n)

    monkeypatch.setattr(_cuda_engine, "leaves", small_leaves)
    launch_native = emulated_native(launch, lambda n: rule)
    device = Device(launch, launch_native, refused_kernel)
    monkeypatch.setattr(_cuda_engine, "KERNEL_COST", 0)
    monkeypatch.setattr(_cuda_engine, "GAP_ELEMENTS", 5_000)
    n = 10_007
    whole = torch.empty(n, dtype=torch.int64)
    offset = STATE.offset + rule.increment(launch, n)  # taken before the split
    for start, stop in small_leaves(n, 8):
        launch_native(None, whole[start:stop], PhiloxState(STATE.seed, offset))
        offset += rule.increment(launch, stop - start)
    for placements in ([Shard(0)], [RaggedShard((), None, block=7)], [InterleavedShard(0, 3)]):
        for index in range(3):
            region = local_region((n,), placements, (3,), (index,))
            local = torch.empty(region.local_shape, dtype=torch.int64)
            left = generate(local, Fill(RandomOp("uniform_", (0.0, 1.0)), region, (1,)), STATE, device, rule)
            assert torch.equal(local, cases.part_of(whole, region))
            assert left.offset == offset


def test_unknown_draws_are_generated_whole() -> None:
    launch = Launch(num_sms=1, threads_per_sm=256)
    device = Device(launch, emulated_native(launch, lambda n: GridStride(4)), no_kernel)
    whole = torch.empty((30, 50), dtype=torch.int64)
    final: list[PhiloxState] = []
    device.native(None, whole, STATE, None, final)
    region = local_region((30, 50), [Shard(1)], (4,), (2,))
    local = torch.empty(region.local_shape, dtype=torch.int64)
    _cuda_engine._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="every rank generates the whole tensor"):
        assert generate(local, Fill(RandomOp("uniform_"), region, (50, 1)), STATE, device, None) == final[0]
    assert torch.equal(local, cases.part_of(whole, region))


# --- what the engine makes of devices that are not as it knows them


class OldDropout(EmulatedGpu):
    """Dropout takes four neighbours of any dtype, as torch did before it took eight halves."""

    def native_rule(self, op: RandomOp, dtype: torch.dtype, n: int, has_parameter: bool) -> PhiloxRule:
        found = super().native_rule(op, dtype, n, has_parameter)
        return Vectors(min(found.width, 4)) if isinstance(found, Vectors) else found


class Strange(EmulatedGpu):
    """One number of each block is used: no rule that the engine knows."""

    def native_rule(self, op: RandomOp, dtype: torch.dtype, n: int, has_parameter: bool) -> PhiloxRule:
        found = super().native_rule(op, dtype, n, has_parameter)
        return GridStride(1) if isinstance(found, GridStride) else found


class Inexact(EmulatedGpu):
    """The kernel compiles, and its numbers are off by one step of the generator."""

    def _launch(self, out: torch.Tensor, parameter: torch.Tensor, plan: Plan, blocks: int, threads: int) -> None:
        plan.block += 1
        super()._launch(out, parameter, plan, blocks, threads)


def expect_bits(gpu: EmulatedGpu, op: RandomOp, dtype: torch.dtype, shape: tuple[int, ...] = (90, 64)) -> Any:
    """Every part of a fill, by the rule that the engine finds; returns the rule."""
    has_parameter = op == RandomOp("bernoulli_")
    rule = _cuda_engine.find_rule(op, dtype, has_parameter, gpu.device, torch.device("cpu"))
    parameter = torch.rand(shape, generator=torch.Generator().manual_seed(2)) if has_parameter else None
    whole = torch.empty(shape, dtype=dtype)
    final: list[PhiloxState] = []
    gpu.native(op, whole, STATE, parameter, final)
    for placements in ([Shard(0)], [Shard(1)], [RaggedShard()]):
        for index in range(8):
            region = local_region(shape, placements, (8,), (index,))
            local = torch.empty(region.local_shape, dtype=dtype)
            given = None if parameter is None else cases.part_of(parameter, region)
            left = generate(local, Fill(op, region, whole.stride()), STATE, gpu.device, rule, given)
            assert torch.equal(local, cases.part_of(whole, region)), (placements, index)
            assert left == final[0]
    return rule


@pytest.fixture
def _warns_again() -> None:
    _cuda_engine._warn_once.cache_clear()


@pytest.mark.helper("philox")
def test_dropout_of_older_versions_is_recognized(_warns_again: None) -> None:
    mask = RandomOp(DROPOUT_MASK, (0.3, False), torch.bfloat16)
    assert expect_bits(OldDropout(SMALL), mask, torch.bool) == Vectors(4)
    assert expect_bits(EmulatedGpu(SMALL), mask, torch.bool) == Vectors(8)


@pytest.mark.helper("philox")
def test_probes_do_not_trust_arguments_that_tell_nothing(_warns_again: None) -> None:
    """Nothing is dropped, one value is possible: every rule would seem to fit. The probes use other arguments."""
    mask = RandomOp(DROPOUT_MASK, (0.0, False), torch.bfloat16)
    assert expect_bits(OldDropout(SMALL), mask, torch.bool) == Vectors(4)
    gpu = Inexact(SMALL)
    assert expect_bits(gpu, RandomOp("random_", (0, 1)), torch.int64) == GridStride(4)
    expect_bits(gpu, RandomOp("random_", (0, 100)), torch.int64)


@pytest.mark.helper("philox")
def test_unknown_rules_fall_back_with_one_warning(_warns_again: None) -> None:
    with pytest.warns(UserWarning, match="every rank generates the whole tensor") as caught:
        assert expect_bits(Strange(SMALL), UNIFORM, torch.float32) is None
    assert len(caught) == 1


@pytest.mark.helper("philox")
def test_kernels_with_other_bits_are_not_used(_warns_again: None) -> None:
    gpu = Inexact(SMALL)
    for op in (UNIFORM, NORMAL):
        expect_bits(gpu, op, torch.float32)
        expect_bits(gpu, op, torch.float32, shape=(7, 3))
    trial = len(gpu.launches)
    expect_bits(gpu, UNIFORM, torch.float32)
    assert len(gpu.launches) == trial, "tried once"
    with pytest.warns(UserWarning, match="its kernel could not be built") as caught:
        expect_bits(gpu, COINS, torch.float32)
    assert len(caught) == 1


@pytest.mark.helper("philox")
def test_probabilities_for_tensors_that_are_not_row_major_are_refused(_warns_again: None) -> None:
    region = local_region((4, 6), [Shard(0)], (2,), (0,))
    local, given = torch.empty(region.local_shape), torch.rand(region.local_shape)
    with pytest.raises(NotImplementedError, match="expected a row-major tensor"):
        generate(local, Fill(COINS, region, (1, 4)), STATE, EmulatedGpu(SMALL).device, Quads(), given)


class Generator:
    """The state of a CUDA generator: 16 bytes."""

    def __init__(self) -> None:
        self.state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self) -> torch.Tensor:
        return self.state

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.clone()


def test_states_are_seed_and_offset() -> None:
    generator: Any = Generator()
    for state in (PhiloxState(0, 0), PhiloxState(2**64 - 1, 2**40), STATE):
        _cuda_engine.write_state(generator, state)
        assert _cuda_engine.read_state(generator) == state
        raw = generator.state.numpy().view("<u8")
        assert (int(raw[0]), int(raw[1])) == (state.seed, state.offset)
    generator.state = torch.zeros(5056, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected 16"):
        _cuda_engine.read_state(generator)


class WrongWhereItCounts(EmulatedGpu):
    """Right with the arguments of the probes, wrong with a standard deviation of 0.25."""

    def _launch(self, out: torch.Tensor, parameter: torch.Tensor, plan: Plan, blocks: int, threads: int) -> None:
        if plan.b == _cuda_engine._bits(0.25):
            plan.block += 1
        super()._launch(out, parameter, plan, blocks, threads)


@pytest.mark.helper("philox")
def test_the_kernel_is_compared_with_the_native_op_for_each_arguments(_warns_again: None) -> None:
    gpu = WrongWhereItCounts(SMALL)
    for std in (1.5, 0.25, 1.5):
        expect_bits(gpu, RandomOp("normal_", (0.0, std)), torch.float32)


@pytest.mark.helper("philox")
def test_without_a_compiler(_warns_again: None) -> None:
    gpu = EmulatedGpu(SMALL, with_kernel=False)
    for op in (UNIFORM, NORMAL, RandomOp(DROPOUT_MASK, (0.4, False), torch.float32)):
        expect_bits(gpu, op, torch.bool if op.name == DROPOUT_MASK else torch.float32)
    with pytest.warns(UserWarning, match="its kernel could not be built"):
        expect_bits(gpu, COINS, torch.bool)


@pytest.mark.helper("philox")
def test_inner_dims_use_the_kernel_and_rows_the_native_op(_warns_again: None) -> None:
    gpu = EmulatedGpu(SMALL)
    rule = _cuda_engine.find_rule(UNIFORM, torch.float32, False, gpu.device, torch.device("cpu"))
    for dim, uses_kernel in ((0, False), (1, True)):
        region = local_region((512, 512), [Shard(dim)], (8,), (3,))
        for _ in range(2):  # the first time, the kernel is compared with the native op
            gpu.calls.clear()
            gpu.launches.clear()
            local = torch.empty(region.local_shape)
            generate(local, Fill(UNIFORM, region, (512, 1)), STATE, gpu.device, rule)
        assert bool(gpu.launches) == uses_kernel
        assert sum(gpu.calls) <= (0 if uses_kernel else 512 * 512 / 8 + 2 * 4096)


@pytest.mark.helper("philox")
def test_the_gpu_benchmark_on_an_emulated_device() -> None:
    """All of its checks: every op and dtype, DTensors, states; so that the first run on a GPU is not the script's first."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script), "--emulate", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["wrong"] == [] and report["parts"] > 6_000
    assert len(report["rows"]) > 80 and not any("unknown" in row["rule"] for row in report["rows"])


@pytest.mark.helper("philox")
def test_the_gpu_benchmark_tells_what_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An op that raises stands in the table with the type and message, the others are compared, and the exit code is 1."""
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", path)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    values = EmulatedGpu._values

    def failing(self: EmulatedGpu, op: RandomOp, *rest: Any) -> None:
        if op.name == "cauchy_":
            raise ArithmeticError("an injected failure")
        values(self, op, *rest)

    def no_clock(*_: Any) -> Any:
        raise OSError("no clock")

    few = [entry for entry in script.ops() if entry[0] in ("uniform", "cauchy")]
    monkeypatch.setattr(script, "ops", lambda: few)
    monkeypatch.setattr(script, "check_dtensors", lambda where: [])
    monkeypatch.setattr(script, "_bandwidth", no_clock)
    monkeypatch.setattr(EmulatedGpu, "_values", failing)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--emulate", "--only", "rng"])
    assert script.main() == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    for op, text in (("cauchy", "ArithmeticError: an injected failure"), ("bandwidth of uniform", "OSError: no clock")):
        found = [row for row in rows if f"| {op} |" in row]
        assert found and all(text in row for row in found)
    right = [row for row in rows if "| uniform |" in row]
    assert len(right) == 4 and all(row.endswith("| 0 |  |") for row in right)
    rows_of_rank: list[str] = []
    with script.recorded(rows_of_rank, " at rank 3"):
        raise KeyError("x")
    assert rows_of_rank == ["KeyError: 'x' at rank 3"]


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*cases.OPS, "bernoulli_tensor"])
def test_bits_of_the_device(name: str) -> None:
    from vescale.rng._engine import fill_region

    rng = random.Random(name)
    op = cases.OPS.get(name, RandomOp("bernoulli_"))
    for dtype in cases.DTYPES.get(name, cases.FLOATS):
        if dtype in (torch.int8, torch.int16) and name != "bernoulli":
            continue
        for shape in ((4097, 1031), (513, 7, 211), (3,), (70_001,)):
            probabilities = torch.rand(shape, device="cuda") if name == "bernoulli_tensor" else None
            whole = torch.empty(shape, dtype=dtype, device="cuda")
            expected = torch.Generator("cuda").manual_seed(11)
            op.fill(whole, expected, probabilities)
            for _ in range(3):
                mesh, placements = cases.random_placements(rng, shape, rng.choice((2, 4, 8)))
                for coordinate in cases.coordinates(mesh):
                    region = local_region(shape, placements, mesh, coordinate)
                    local = torch.empty(region.local_shape, dtype=dtype, device="cuda")
                    generator = torch.Generator("cuda").manual_seed(11)
                    given = None if probabilities is None else cases.part_of(probabilities, region)
                    fill_region(local, Fill(op, region, whole.stride()), generator, given)
                    assert torch.equal(local, cases.part_of(whole, region)), (dtype, shape, mesh, placements)
                    assert torch.equal(generator.get_state(), expected.get_state())
