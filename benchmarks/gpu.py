"""Random numbers on a CUDA device: the bits of every op, dtype and placement against the native op, and bandwidth. Then the
engine of ``fully_shard`` (:mod:`benchmarks.gpu_engine`), and a step in static mode as a CUDA graph
(:mod:`benchmarks.gpu_capture`).

    python benchmarks/gpu.py [--json] [--minutes 8] [--emulate] [--only rng|engine|capture]

Run it on a GPU after every change of the engine or of torch, and put the table it prints into docs/rng.md with the date and
the device. One GPU is enough: each coordinate of a mesh is asked for its part, one after the other, and DTensors run on a
fake process group. ``--emulate`` runs the same checks on an emulated device, small, to check this script itself.

What raises is written into the table with its type and message, and the rest is compared all the same. Exit code: 0 when
all bits are equal, and also without a CUDA device (a line says that nothing was run); 1 when bits differ, when the kernel
cannot be compiled, or when anything raised; 2 when only a bandwidth missed its bound.

==========================  ======  =======================================================================================
figure                      bound   how
==========================  ======  =======================================================================================
Shard(0) / native            >=0.9  bytes per second of filling a quarter of 16384 x 16384, against the native op on a tensor
                                    of the quarter's size; interleaved, medians
Shard(1) / native            >=0.7  the same for a quarter of the columns; also of 8192 (a pass of all threads is whole rows
                                    there, and all numbers of a block are a rank's) and of 14336 (it is not)
==========================  ======  =======================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import gpu_capture, gpu_engine
from tests.rng import cases
from tests.rng.emulated_gpu import EmulatedGpu
from vescale import csrc, rng
from vescale.compat import local_of, make_dtensor, make_spec, spec_of
from vescale.placements import RaggedShard, local_region
from vescale.rng import _cuda_engine, _engine
from vescale.rng._philox import Launch, PhiloxRule, PhiloxState
from vescale.rng._random_ops import DROPOUT_MASK, Fill, RandomOp

SEED = 2**40 + 17
BOUNDS = {"Shard(0)": 0.9, "Shard(1)": 0.7}


class Real:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device())
        self.device = _cuda_engine.device_at(self.where.index)
        self.name = torch.cuda.get_device_name()

    def compile(self) -> None:
        _cuda_engine.build(_cuda_engine.Kind(0, 4, 4, 0, 0, 0, 1))

    def native(self, op: RandomOp, out: torch.Tensor, parameter: torch.Tensor | None) -> Any:
        generator = torch.Generator(self.where).manual_seed(SEED)
        op.fill(out, generator, parameter)
        return generator.get_state().tolist()

    def fill(self, op: RandomOp, local: torch.Tensor, region: Any, strides: Any, parameter: Any) -> Any:
        generator = torch.Generator(self.where).manual_seed(SEED)
        _engine.fill_region(local, Fill(op, region, strides), generator, parameter)
        return generator.get_state().tolist()


class Emulated:
    """A device of 1,024 threads on the CPU."""

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.gpu = EmulatedGpu(Launch(2, 512))
        self.device = self.gpu.device
        self.name = "an emulated device of 1,024 threads"
        self.rule = functools.cache(functools.partial(_cuda_engine.find_rule, device=self.device, where=self.where))

    def compile(self) -> None:
        assert csrc.load("philox") is not None

    def native(self, op: RandomOp, out: torch.Tensor, parameter: torch.Tensor | None) -> Any:
        final: list[PhiloxState] = []
        self.device.native(op, out, PhiloxState(SEED, 0), parameter, final)
        return final[0]

    def fill(self, op: RandomOp, local: torch.Tensor, region: Any, strides: Any, parameter: Any) -> Any:
        rule = self.rule(op, local.dtype, parameter is not None)
        return _cuda_engine.generate(
            local, Fill(op, region, strides), PhiloxState(SEED, 0), self.device, rule, parameter
        )


@contextlib.contextmanager
def recorded(wrong: list[str], where: str = "") -> Iterator[None]:
    """What fails inside is written down; the others are to be compared all the same."""
    try:
        yield
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}{where}")


@dataclass
class Row:
    """One op and dtype: how it draws, how its elements are made, and how many parts were compared."""

    op: str
    dtype: str = ""
    rule: str = ""
    kernel: bool = False
    parts: int = 0
    wrong: list[str] = field(default_factory=list)


def ops() -> Iterator[tuple[str, RandomOp, torch.dtype, bool]]:
    """(name, op, dtype of the tensor, whether it takes a tensor of probabilities)."""
    for name, op in cases.OPS.items():
        for dtype in cases.DTYPES.get(name, cases.FLOATS):
            yield name, op, dtype, False
    for dtype in (*cases.FLOATS, torch.bool):
        yield "bernoulli_ tensor", RandomOp("bernoulli_"), dtype, True
    for dtype in cases.FLOATS:
        yield "dropout", RandomOp(DROPOUT_MASK, (0.3, False), dtype), torch.bool, False
        yield "dropout, with holes", RandomOp(DROPOUT_MASK, (0.3, True), dtype), torch.bool, False


def check(target: Any, num_meshes: int, deadline: float) -> list[Row]:
    """Every op and dtype on shapes below and above one pass of all threads, over random meshes and placements."""
    rows = []
    for name, op, dtype, has_parameter in ops():
        row = Row(name, str(op.dtype or dtype).removeprefix("torch."))
        rows.append(row)
        if time.monotonic() > deadline:
            row.wrong.append("not compared: no time left")
            continue
        with recorded(row.wrong):
            rule = _cuda_engine.find_rule(op, dtype, has_parameter, target.device, target.where)
            row.rule = _text(rule)
            _compare(row, target, op, dtype, has_parameter, num_meshes)
            row.kernel = _trusts(target, op, dtype, has_parameter, rule)
    return rows


def _compare(row: Row, target: Any, op: RandomOp, dtype: torch.dtype, has_parameter: bool, num_meshes: int) -> None:
    choose = random.Random(f"{row.op} {row.dtype}")
    threads = target.device.launch.max_threads
    columns = 4096 if threads > 10_000 else 64
    for shape in ((3,), (7, 5, 11), (threads // 3,), (9 * threads // columns + 1, columns), (5, 3 * threads // 10 + 1)):
        parameter = torch.rand(shape, device=target.where) if has_parameter else None
        order = tuple(range(len(shape))) if has_parameter else cases.random_memory_order(choose, len(shape))
        whole = cases.empty_in_order(shape, order, dtype).to(target.where)
        state = target.native(op, whole, parameter)
        lies: list[Any] = [((4,), [Shard(0)]), ((4,), [Shard(len(shape) - 1)]), ((3,), [RaggedShard()])]
        lies += [cases.random_placements(choose, shape, choose.choice((2, 4, 8))) for _ in range(num_meshes)]
        for mesh, placements in lies:
            for coordinate in cases.coordinates(mesh):
                region = local_region(shape, placements, mesh, coordinate)
                local = torch.empty(region.local_shape, dtype=dtype, device=target.where)
                given = None if parameter is None else cases.part_of(parameter, region)
                left = target.fill(op, local, region, whole.stride(), given)
                row.parts += 1
                where = f"{shape} order {order} mesh {mesh} {placements} at {coordinate}"
                if not torch.equal(_bits(local), _bits(cases.part_of(whole, region))):
                    row.wrong.append(f"values: {where}")
                if left != state:
                    row.wrong.append(f"state: {where}")


def _text(rule: PhiloxRule | None) -> str:
    return "unknown: generated whole" if rule is None else str(rule).replace("()", "")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=-7.0) if values.is_floating_point() else values


def _trusts(target: Any, op: RandomOp, dtype: torch.dtype, has_parameter: bool, rule: PhiloxRule | None) -> bool:
    kernels = target.device.kernel.__self__
    local = torch.empty(1, dtype=dtype, device=target.where)
    parameter = torch.rand(1, device=target.where) if has_parameter else None
    return rule is not None and bool(kernels.trusts(op, rule, local, parameter))


DTENSOR_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_": lambda x: x.clone().normal_(),
    "rand_like": torch.rand_like,
    "randn_like bfloat16": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint_like": lambda x: torch.randint_like(x, 5, 90),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout bfloat16": lambda x: F.dropout(x.bfloat16(), 0.1),
    "dropout float64": lambda x: F.dropout(x.double(), 0.15),
    "dropout transposed": lambda x: F.dropout(x.t(), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
}


def check_dtensors(where: torch.device) -> list[Row]:
    """Functions of DTensors on a fake process group of four ranks, the device under each of them in turn."""
    rows = {name: Row(f"DTensor {name}") for name in DTENSOR_FUNCTIONS}
    # A process for each rank: DTensor caches what it decides, and with it the rank that it was.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for found in pool.starmap(_check_rank, [(rank, where.type) for rank in range(4)], chunksize=1):
            for name, (parts, wrong) in found.items():
                rows[name].parts += parts
                rows[name].wrong += wrong
    return list(rows.values())


def _check_rank(rank: int, kind: str) -> dict[str, tuple[int, list[str]]]:
    """name -> (comparisons, what was wrong), as one of four ranks."""
    where = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    shapes = ((1030, 517), (1031, 517), (4096, 1024)) if kind == "cuda" else ((30, 17), (31, 17))
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    mesh = init_device_mesh(kind, (2, 2))
    rng.enable()
    found: dict[str, tuple[int, list[str]]] = {}
    for name, function in DTENSOR_FUNCTIONS.items():
        parts, wrong = 0, []
        for shape, placements in itertools.product(
            shapes, ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)])
        ):
            parts += 1
            at = f" ({shape} {placements} rank {rank})"
            with recorded(wrong, at):
                problem = _dtensor_problem(function, shape, mesh, placements, where)
                if problem:
                    wrong.append(problem + at)
        found[name] = parts, wrong
    return found


def _dtensor_problem(
    function: Callable[[torch.Tensor], torch.Tensor], shape: Any, mesh: Any, placements: Any, where: torch.device
) -> str | None:
    def state() -> torch.Tensor:
        return torch.cuda.get_rng_state() if where.type == "cuda" else torch.get_rng_state()

    def region_of(spec: Any) -> Any:
        return local_region(tuple(spec.shape), spec.placements, (2, 2), mesh.get_coordinate())

    source = torch.randn(shape, device=where, generator=torch.Generator(where).manual_seed(3))
    torch.manual_seed(SEED)
    expected, after = function(source), state()
    spec = make_spec(mesh, placements, shape, source.stride(), source.dtype)
    torch.manual_seed(SEED)
    result: Any = function(make_dtensor(cases.part_of(source, region_of(spec)), spec))
    if not torch.equal(_bits(local_of(result)), _bits(cases.part_of(expected, region_of(spec_of(result))))):
        return "values"
    return None if torch.equal(state(), after) else "generator state"


def check_large(target: Any) -> list[Row]:
    """More than 2 GiB, which the native op fills in several launches."""
    rows = []
    for name, dtype, n in (("uniform", torch.float32, 600_000_007), ("normal", torch.bfloat16, 1_100_000_001)):
        row = Row(f"{name}, {n * dtype.itemsize / 2**30:.1f} GiB", str(dtype).removeprefix("torch."))
        rows.append(row)
        if torch.cuda.mem_get_info()[0] < 2 * n * dtype.itemsize:
            row.wrong.append("not compared: too little free memory on the device")
            continue
        with recorded(row.wrong):
            whole = torch.empty(n, dtype=dtype, device=target.where)
            state = target.native(cases.OPS[name], whole, None)
            for index in range(4):
                region = local_region((n,), [Shard(0)], (4,), (index,))
                local = torch.empty(region.local_shape, dtype=dtype, device=target.where)
                left = target.fill(cases.OPS[name], local, region, (1,), None)
                row.parts += 1
                start = sum(len(c) for c in torch.empty(n, device="meta").chunk(4)[:index])
                if not torch.equal(local, whole[start : start + local.numel()]) or left != state:
                    row.wrong.append(f"rank {index} of 4")
    return rows


def bandwidth(target: Any, turns: int) -> tuple[list[dict[str, Any]], list[Row]]:
    """Bytes per second of our fills against the native op on a tensor of the same size; and rows for what raised."""
    sizes = ((16384, 16384), (32768, 8192), (16384, 14336)) if target.where.type == "cuda" else ((256, 256),)
    found, failed = [], []
    for name, dtype in itertools.product(
        ("uniform", "normal", "bernoulli", "exponential"), (torch.float32, torch.bfloat16)
    ):
        lies = [(sizes[0], Shard(0)), *((shape, Shard(1)) for shape in sizes)]
        for shape, placement in lies:
            row = Row(f"bandwidth of {name}", str(dtype).removeprefix("torch."))
            with recorded(row.wrong, f" ({shape} {placement})"):
                found.append(_bandwidth(target, turns, name, dtype, shape, placement))
            failed += [row] if row.wrong else []
    return found, failed


def _bandwidth(
    target: Any, turns: int, name: str, dtype: torch.dtype, shape: tuple[int, int], placement: Shard
) -> dict[str, Any]:
    op, region = cases.OPS[name], local_region(shape, [placement], (4,), (1,))
    local = torch.empty(region.local_shape, dtype=dtype, device=target.where)
    native = torch.empty_like(local)
    ours = functools.partial(target.fill, op, local, region, (shape[1], 1), None)
    theirs = functools.partial(target.native, op, native, None)
    cost = _cuda_engine.KERNEL_COST
    seconds: dict[str, list[float]] = {"native": [], "ours": [], "sweep": []}
    for _ in range(turns):
        seconds["native"].append(_seconds(theirs))
        seconds["ours"].append(_seconds(ours))
        _cuda_engine.KERNEL_COST = math.inf  # never the kernel
        try:
            seconds["sweep"].append(_seconds(ours))
        finally:
            _cuda_engine.KERNEL_COST = cost

    def ratio(side: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["native"], seconds[side], strict=True)), 3)

    return {
        "op": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": f"{shape[0]} x {shape[1]}",
        "placement": f"Shard({placement.dim})",
        "native_gb_per_s": round(local.nbytes / statistics.median(seconds["native"]) / 1e9, 1),
        "ratio": ratio("ours"),
        "ratio_without_kernel": ratio("sweep"),
        "bound": BOUNDS[f"Shard({placement.dim})"],
    }


def _seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    call()
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize()
    return (time.perf_counter() - start) / repeats


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop comparing after this long")
    parser.add_argument("--emulate", action="store_true", help="on an emulated device: checks this script, not a GPU")
    parser.add_argument("--only", choices=["rng", "engine", "capture"], help="one part of it")
    options = parser.parse_args()
    if not options.emulate and not torch.cuda.is_available():
        print("no CUDA device: nothing was run (--emulate checks the script itself)")
        return 0
    warnings.filterwarnings("ignore", message=".*out of bounds.*")
    start = time.monotonic()
    deadline = start + 60 * options.minutes * 0.6  # the rest is for large fills and bandwidth
    capture = gpu_capture.Capture()
    if options.only in (None, "capture"):
        capture = gpu_capture.measure("cpu" if options.emulate else "cuda")
        if options.only == "capture":
            print(json.dumps(vars(capture)) if options.json else gpu_capture.text(capture))
            return 1 if capture.wrong else 0
    engine = (
        [] if options.only == "rng" else gpu_engine.measure(gpu_engine.Device("cpu" if options.emulate else "cuda"))
    )
    broken = [f"{row.part}, {row.setting}: {text}" for row in engine for text in row.wrong]
    broken += [f"capture: {text}" for text in capture.wrong]
    if options.only == "engine":
        print(json.dumps([vars(row) for row in engine], indent=1) if options.json else gpu_engine.table(engine))
        return 1 if broken else 0
    target: Any = Emulated() if options.emulate else Real()
    kernel = Row("kernel of vescale.rng")
    with recorded(kernel.wrong):
        target.compile()
        kernel.kernel = True
    rows = [kernel, *check(target, 1 if options.emulate else 3, deadline)]
    rows += check_dtensors(target.where)
    if not options.emulate:
        rows += check_large(target)
    speed, failed = bandwidth(target, 2 if options.emulate else 7)
    rows += failed
    report = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": target.name,
        "threads": target.device.launch.max_threads,
        "parts": sum(row.parts for row in rows),
        "wrong": [f"{row.op} {row.dtype}: {text}" for row in rows for text in row.wrong] + broken,
        "engine": [vars(row) for row in engine],
        "rows": [vars(row) for row in rows],
        "capture": vars(capture),
        "bandwidth": speed,
        "seconds": round(time.monotonic() - start, 1),
    }
    print(
        json.dumps(report, indent=1)
        if options.json
        else f"{_tables(report)}\n\n{gpu_engine.table(engine)}\n\n{gpu_capture.text(capture)}"
    )
    if report["wrong"]:
        return 1
    return 2 if not options.emulate and any(entry["ratio"] < entry["bound"] for entry in speed) else 0


def _tables(report: dict[str, Any]) -> str:
    lines = [
        f"{report['date']}, {report['device']} ({report['threads']:,} threads), torch {report['torch']}, "
        f"CUDA {report['cuda']}: {report['parts']:,} parts compared in {report['seconds']} s, "
        f"{len(report['wrong'])} wrong.",
        "",
        "| op | dtype | draws | kernel | parts | wrong | the first |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        kernel = "yes" if row["kernel"] else "no"
        cells = row["op"], row["dtype"], row["rule"], kernel, row["parts"], len(row["wrong"])
        lines.append(f"| {' | '.join(map(str, cells))} | {row['wrong'][0] if row['wrong'] else ''} |")
    lines += ["", "| op | dtype | shape | placement | native GB/s | ours / native | without kernel | asked |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for entry in report["bandwidth"]:
        lines.append(
            f"| {entry['op']} | {entry['dtype']} | {entry['shape']} | {entry['placement']} | {entry['native_gb_per_s']} | "
            f"{entry['ratio']} | {entry['ratio_without_kernel']} | {entry['bound']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
