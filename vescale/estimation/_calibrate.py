"""Measures this machine and writes its table."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale._parallelize import parallelize
from vescale.comm import all_gather_into, all_reduce_, all_to_all_v, messages, reduce_scatter_into
from vescale.compat import TorchDispatchMode, note
from vescale.errors import ArgumentError
from vescale.estimation._devices import Curve, Device
from vescale.estimation._estimate import estimate
from vescale.estimation._memory_log import RANDOM_SPANS, SKIPPED_OUTPUTS, Instant, OpCosts, size_of
from vescale.estimation._step_time import StepTime
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan
from vescale.rng import fill_spans, skip_outputs

# Seconds of ops and of collectives, measured by every rank of a job on this host: one thread each, all at once.


COLLECTIVE_BYTES = (1 << 8, 1 << 12, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""That a rank receives, of the collectives that are measured."""

_SAMPLES = 5
_NOWHERE = Instant(0, "forward", None)
_OUTPUTS = (1 << 14, 1 << 17, 1 << 20, 1 << 23)  # of a generator
_SPANS = (1, 4, 16)
_OP_ROWS = (8, 64, 512, 4096)  # of 256 numbers
_FOOTPRINT = (
    32 << 20
)  # bytes that the operands and results of an op go through: a step has more than a core's caches hold
_MOST_SETS = 256
_ATEN = torch.ops.aten
_LENGTHS = (32, 128, 512)
_SIZES = ((32, 64, 64), (128, 128, 128), (256, 256, 512), (512, 512, 1024))  # rows, inputs and outputs of a product


class _Called(TorchDispatchMode):
    """The ops of a call, as an estimate counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = OpCosts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.costs.add(_NOWHERE, func, args, kwargs or {}, result)
        return result


def measure_ops(samples: int = _SAMPLES) -> dict[str, list[list[float]]]:
    """By op, [size of a call, seconds]; sizes are floating-point operations, or bytes of ops that have none.

    Ops of models, their backwards and optimizers, each at several sizes; a call includes what PyTorch does in C++ and
    what Python does to call it. Operands of ops that move memory, and their results, are not in a core's caches: a step
    has written others since.
    """
    found: dict[str, list[list[float]]] = {}
    with torch.no_grad():
        for call in _calls():
            with _Called() as mode:
                call.once()
            sizes = [(key[3], size_of(key)) for key in mode.costs.by_key]
            if len(sizes) != 1:
                continue  # another version of PyTorch has no op of its own for it
            ((name, size),) = sizes
            for _ in range(call.num_sets):  # memory that nobody has written to takes longer
                call()
            found.setdefault(name, []).append([float(size), _op_seconds(call, samples)])
    found[SKIPPED_OUTPUTS] = [
        [4.0 * number, _op_seconds(_Alternating([_skip(number)]), samples)] for number in _OUTPUTS
    ]
    found[RANDOM_SPANS] = [[float(number), _op_seconds(_Alternating([_fill(number)]), samples)] for number in _SPANS]
    return {name: _ascending(points) for name, points in sorted(found.items())}


def _op_seconds(call: Callable[[], Any], samples: int) -> float:
    """Processor seconds of one call: the median of several series."""
    call()
    number = _number_of_calls(call)
    return statistics.median(_series(call, number)[1] for _ in range(samples))


def _number_of_calls(call: Callable[[], Any]) -> int:
    begin = time.perf_counter()
    call()
    return max(2, min(256, int(0.002 / max(time.perf_counter() - begin, 1e-6))))


def _series(call: Callable[[], Any], number: int) -> tuple[float, float]:
    """Seconds of a call by the clock, and of this process's processors."""
    begin, begin_processor = time.perf_counter(), time.process_time()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number, (time.process_time() - begin_processor) / number


def _ascending(points: list[list[float]]) -> list[list[float]]:
    """Sorted by size, one point for each; larger calls take no less."""
    found: dict[float, list[float]] = {}
    least = [0.0] * len(points[0][1:])
    for size, *seconds in sorted(points):
        least = [float(f"{max(a, b):.4g}") for a, b in zip(least, seconds)]
        found.setdefault(size, least)
    return [[size, *seconds] for size, seconds in found.items()]


def _skip(number: int) -> Callable[[], Any]:
    """Step over so many 32-bit outputs of a generator, as a rank does at those of other ranks."""
    generator = torch.Generator()
    return lambda: skip_outputs(generator, number)


def _fill(num_spans: int) -> Callable[[], Any]:
    generator = torch.Generator()
    return lambda: fill_spans(generator, num_spans)


class _Alternating:
    """A call of an op with other operands each time, and with the memory of an older result for its own."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.once = calls[0]
        self._calls = itertools.cycle(calls)
        self._results: deque[Any] = deque(maxlen=len(calls))
        self.num_sets = len(calls)

    def __call__(self) -> None:
        self._results.append(next(self._calls)())


def _calls() -> Iterator[_Alternating]:
    for rows in _OP_ROWS:
        num_sets = min(max(_FOOTPRINT // (rows * 256 * 4 * 3), 1), _MOST_SETS)
        yield from map(_Alternating, zip(*(_of_memory(rows) for _ in range(num_sets))))
    for sizes in _SIZES:
        yield from (_Alternating([call]) for call in _products(*sizes))
    for length in _LENGTHS:
        yield from (_Alternating([call]) for call in _attention(length))


def _of_memory(rows: int) -> Iterator[Callable[[], Any]]:
    x, y, z = (torch.rand(rows, 256) for _ in range(3))
    weight, ids = torch.rand(max(rows, 64), 256), torch.randint(0, 64, (rows,))
    one, column, flag = torch.ones(256), torch.rand(rows, 1), torch.rand(rows, 256) > 0.5
    soft, out = x.softmax(-1), torch.rand(rows, 256)
    labels = torch.randint(0, 256, (rows,))
    mean, inverse = x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt()
    yield lambda: x + y
    yield lambda: x - y
    yield lambda: x * y
    yield lambda: x / y
    yield lambda: -x
    yield lambda: x.pow(2)
    yield lambda: x.rsqrt()
    yield lambda: x.sqrt()
    yield lambda: x.exp()
    yield lambda: x.sigmoid()
    yield lambda: x.tanh()
    yield lambda: x.relu()
    yield lambda: F.silu(x)
    yield lambda: F.gelu(x)
    yield lambda: _ATEN.silu_backward(y, x)
    yield lambda: _ATEN.gelu_backward(y, x)
    yield lambda: _ATEN.threshold_backward(y, x, 0)
    yield lambda: x.mean(-1, keepdim=True)
    yield lambda: x.sum(-1, keepdim=True)
    yield lambda: x.sum(0, keepdim=True)
    yield lambda: x.clone()
    yield lambda: out.copy_(x)
    yield lambda: out.zero_()
    yield lambda: out.fill_(1.0)
    yield lambda: torch.zeros_like(x)
    yield lambda: torch.ones_like(x)
    yield lambda: torch.cat([x, y], 0)
    yield lambda: x.to(torch.float64)
    yield lambda: torch.where(flag, x, y)
    yield lambda: x.masked_fill(flag, 0.0)
    yield lambda: x.softmax(-1)
    yield lambda: x.log_softmax(-1)
    yield lambda: _ATEN._softmax_backward_data(x, soft, -1, torch.float32)
    yield lambda: _ATEN._log_softmax_backward_data(x, soft, -1, torch.float32)
    yield lambda: _ATEN.nll_loss_forward(soft, labels, None, 1, -100)
    yield lambda: _ATEN.native_layer_norm(x, [256], one, one, 1e-5)
    yield (lambda: _ATEN.native_layer_norm_backward(x, y, [256], mean, inverse, one, one, [True, True, True]))
    yield lambda: F.embedding(ids, weight)
    yield lambda: _ATEN.embedding_dense_backward(x, ids, 64, -1, False)
    yield lambda: out.add_(x)
    yield lambda: out.mul_(0.5)
    yield lambda: out.lerp_(y, 0.1)
    yield lambda: out.addcmul_(x, y, value=0.1)
    yield lambda: out.addcdiv_(x, z, value=0.1)
    yield lambda: out * column
    rows_of = torch.randint(0, rows, (rows,))
    yield lambda: x[rows_of]
    yield lambda: _ATEN.index_put(out, [rows_of], x, True)
    yield lambda: out.index_add_(0, rows_of, x)
    yield lambda: _ATEN.slice_backward(x, [x.shape[0], 512], 1, 0, 256, 1)
    yield lambda: x.new_zeros(x.shape)
    yield lambda: out.bernoulli_(0.9)
    yield lambda: out.uniform_()
    yield lambda: out.normal_()
    yield lambda: torch.rand_like(x)
    yield lambda: out.div_(1.5)
    yield lambda: _ATEN.tanh_backward(y, x)
    yield lambda: _ATEN._safe_softmax(x, -1)
    yield lambda: x.amax(-1, keepdim=True)
    yield lambda: x.cumsum(-1)
    scores = torch.rand(rows, 8)
    first = scores.topk(2).indices
    numbers = first.flatten().float()
    yield lambda: scores.topk(2)
    yield lambda: first.flatten().sort()
    yield lambda: scores.gather(1, first)
    yield lambda: scores.scatter(1, first, 0.5)
    yield lambda: numbers.histc(8, 0, 7)
    yield (lambda: _ATEN.nll_loss_backward(one[0], soft, labels, None, 1, -100, torch.tensor(float(labels.numel()))))


def _products(rows: int, inner: int, columns: int) -> Iterator[Callable[[], Any]]:
    left, right, bias = torch.rand(rows, inner), torch.rand(columns, inner), torch.rand(columns)
    stacked, other = torch.rand(4, rows // 4, inner), torch.rand(4, inner, columns)
    yield lambda: left @ right.t()
    yield lambda: torch.addmm(bias, left, right.t())
    yield lambda: torch.bmm(stacked, other)
    if hasattr(F, "grouped_mm"):
        ends = torch.arange(1, 5, dtype=torch.int32) * (rows // 4)
        yield lambda: F.grouped_mm(left, other, offs=ends)


def _attention(length: int) -> Iterator[Callable[[], Any]]:
    query = torch.rand(2, 4, length, 32)
    attention = _ATEN._scaled_dot_product_flash_attention_for_cpu
    output, log_sum = attention(query, query, query, 0.0, True)
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    yield lambda: attention(query, query, query, 0.0, True)
    yield lambda: backward(output, query, query, query, output, log_sum, 0.0, True)


def measure_collectives(samples: int = _SAMPLES) -> dict[str, list[list[float]]]:
    """By collective, [bytes that a rank receives, seconds, processor seconds of a rank], between all ranks of the default
    group."""
    found: dict[str, list[list[float]]] = {}
    for num_bytes in COLLECTIVE_BYTES:
        for name, call in _collectives(num_bytes):
            clock, processor = (each / (2 if name == "send" else 1) for each in _least_of_all(call, samples))
            found.setdefault(name, []).append([float(num_bytes), clock, processor])
    return {name: _ascending(points) for name, points in found.items()}


def _collectives(num_bytes: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    group = dist.group.WORLD
    assert group is not None
    num_ranks, rank = group.size(), group.rank()
    piece = max(num_bytes // 4 // (num_ranks - 1), 1)
    whole = torch.zeros(piece * num_ranks)
    part, other = whole[:piece].clone(), torch.zeros_like(whole)
    sizes = [piece] * num_ranks
    reduced = torch.zeros(max(num_bytes * num_ranks // (8 * (num_ranks - 1)), 1))
    message = torch.zeros(max(num_bytes // 4, 1))
    yield "all_gather", lambda: all_gather_into(whole, part, group).wait()
    yield "reduce_scatter", lambda: reduce_scatter_into(part, other, "sum", group).wait()
    yield "all_reduce", lambda: all_reduce_(reduced, "sum", group).wait()
    yield "all_to_all", lambda: all_to_all_v(whole, sizes, sizes, group).wait()
    yield "broadcast", lambda: dist.broadcast(message, 0)
    yield "send", lambda: _message(message, rank)


def _message(message: torch.Tensor, rank: int) -> None:
    """From rank 0 to rank 1 and back: two messages, of which each rank waits for both."""
    for sender in (0, 1):
        if rank == sender:
            dist.send(message, 1 - sender)
        elif rank == 1 - sender:
            dist.recv(message, sender)


def _least_of_all(call: Callable[[], Any], samples: int) -> tuple[float, float]:
    """Of one call, which all ranks make, on the slowest rank: the least series by the clock, and the least in processor
    seconds, which waiting for ranks that other work keeps from their processors makes more of."""
    call()
    number = torch.tensor([min(_number_of_calls(call), 32)])
    dist.broadcast(number, 0)
    dist.barrier()
    series = torch.tensor([_series(call, int(number)) for _ in range(samples)], dtype=torch.float64)
    dist.all_reduce(series, op=dist.ReduceOp.MAX)
    return float(series[:, 0].min()), float(series[:, 1].min())


# Small parallelized models whose steps every rank of a calibration times.

_STEPS = 20
_HEADS, _BLOCKS, _ROWS = 4, 2, 4


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query, key, value = (one(y).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for one in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass(frozen=True)
class Reference:
    """Data parallel over all ranks.

    Attributes:
        shows: of which kind (:data:`vescale.estimation.HOST_KINDS`) it has more than others; None: of none.
    """

    ranks: int
    width: int
    length: int
    shows: str | None = None

    def model(self) -> nn.Module:
        return _Model(self.width)

    def plan(self, mesh: Any = None) -> Plan:
        plan = Plan(mesh if mesh is not None else {"dp": self.ranks})
        plan.shard("<in:x>", {"dp": Shard(0)})
        if self.shows == "unit":
            plan.shard(".*", {"dp": RaggedShard()}, phase=INIT).shard(".*", {"dp": Replicate()}, phase=RUN)
            plan.unit(r"blocks\.\d+")
        if self.shows == "crossing":
            plan.local(r"blocks\.\d+\.(norm|down)", inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})
        policy = {"recompute": "full", "saving": "selective"}.get(self.shows or "")
        return plan if policy is None else plan.checkpoint(r"blocks\.\d+", policy)

    @property
    def shape(self) -> tuple[int, ...]:
        return _ROWS * self.ranks, self.length, self.width

    def parts(self) -> tuple[Callable[[], None], ...]:
        """Forward, backward and optimizer of this rank, to be called again and again."""
        torch.manual_seed(0)  # ops before have drawn numbers, not equally many on all ranks
        model = parallelize(self.model(), self.plan(init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("dp",))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.ones(self.shape)

        losses = []

        def forward() -> None:
            losses.append(model(x))

        def backward() -> None:
            losses.pop().backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return forward, backward, update

    def step(self) -> Callable[[], None]:
        """A training step of this rank, to be called again and again."""
        parts = self.parts()

        def step() -> None:
            for part in parts:
                part()

        return step

    def step_seconds(self) -> list[float]:
        """Processor seconds of this rank for a forward, backward and update: medians of several steps."""
        parts = self.parts()
        found = []
        for _ in range(_STEPS):
            times = [time.process_time()]
            for part in parts:
                part()
                times.append(time.process_time())
            found.append([end - begin for begin, end in itertools.pairwise(times)])
        return [statistics.median(part) for part in zip(*found[2:])]


def references(ranks: int) -> tuple[Reference, ...]:
    """A small model, whose step is mostly the host's, and a larger one, whose step is mostly ops; then the small one with
    blocks that are computed again, that save results of some ops, whose parameters are in parts between uses, and that run
    in part on local tensors."""
    small = Reference(ranks, 64, 16)
    kinds = ("recompute", "saving", "unit", "crossing")
    return small, Reference(ranks, 256, 128), *(replace(small, shows=kind) for kind in kinds)


def on_processors(device: Device) -> Device:
    """The same table for processor seconds, which overlap hides nothing of."""
    curves = {
        name: Curve(tuple((size, seconds[-1]) for size, *seconds in curve.points))
        for name, curve in device.collectives.items()
    }
    return replace(device, collectives=curves, overlap=0.0)


def measure_rank(samples: int, rank: int, send: Callable[[Any], None]) -> None:
    """What a rank of a calibration does, for :func:`vescale.comm.messages`."""
    found = {"ops": measure_ops(samples), "collectives": measure_collectives(samples)}
    send(("measured", {**found, "steps": [one.step_seconds() for one in references(dist.get_world_size())]}))


_REPEATS = 5
_MEASURED = ("flops", "efficiency", "bandwidth", "bandwidth_efficiency", "op_seconds")
_LINKS = ("dtensor_seconds", "node_bandwidth", "node_latency", "overlap", "ops", "collectives", "measured_ranks")


def calibrate(file: str | os.PathLike[str], device: str | None = None, *, ranks: int = 2, samples: int = 5) -> Device:
    """Measure this machine, and write a table to ``file``: matrix products of several sizes, copies, ops on small tensors.

    Of a host, ``ranks`` processes with one thread each are started, as a job on it has. All of them measure the ops of
    models at once, then collectives over gloo, then steps of small parallelized models, from which follow how much slower
    ops are in a step than in a loop, and what the host takes beside: for ops on DTensors in forwards, backwards,
    recomputations and the optimizer, for units and local regions. Seconds of ops are processor time, the
    median of several series, and those of collectives the least: whatever else runs on the host makes them longer. Of a
    GPU, collectives stay typical ones.

    Some ten seconds. Raises OSError where the file cannot be written, ValueError for fewer than two ranks.

    Args:
        device: ``"cpu"`` or the accelerator's type; None: the accelerator if there is one.
        ranks: processes of a host that measure collectives.
        samples: series of each measurement.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device or ("cpu" if accelerator is None else accelerator.type)
    if ranks < 2:
        raise ArgumentError(f"calibrate: ranks is {ranks}; collectives need at least 2")
    names = ("float32", "bfloat16", "float64") if kind == "cpu" else ("float32", "bfloat16", "float16")
    flops, points = {}, []
    threads = torch.get_num_threads()
    if kind == "cpu":
        note("estimation._calibrate:process", "torch.set_num_threads")
        torch.set_num_threads(1)
    for name in names:
        rates = []
        for size in (16, 64, 256, 512) if kind == "cpu" else (256, 1024, 4096, 8192):
            left = torch.ones(size, size, dtype=getattr(torch, name), device=kind)
            rates.append((2.0 * size**3, 2.0 * size**3 / _seconds(lambda left=left: left @ left, kind)))  # type: ignore[misc]
        flops[name] = max(rate for _, rate in rates)
        if name == "float32":
            points = [[work, round(rate / flops[name], 4)] for work, rate in rates]
    large = torch.ones(1 << (23 if kind == "cpu" else 28), device=kind)
    bandwidth = 2 * large.numel() * 4 / _seconds(lambda: large.clone(), kind)
    small = torch.ones(8, device=kind)
    op_seconds = _seconds(lambda: small + small, kind)
    torch.set_num_threads(threads)
    default = Path(__file__).parent / "devices" / ("cpu.yaml" if kind == "cpu" else "h100-80g.yaml")
    data: dict[str, Any] = yaml.safe_load(default.read_text(encoding="utf-8"))
    if kind != "cpu":
        data["memory_bytes"] = int(torch.get_device_module(kind).get_device_properties(0).total_memory)
    measured = f"measured on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}"
    data |= {
        "flops": flops,
        "efficiency": points,
        "bandwidth": bandwidth,
        "bandwidth_efficiency": 1.0,
        "op_seconds": op_seconds,
        "confidence": {**data["confidence"], "compute": 0.15, "memory": 0.15},
        "sources": {**data["sources"], **dict.fromkeys(_MEASURED, measured)},
    }
    if kind == "cpu":
        data |= _of_ranks(data, ranks, samples, str(file))
        data["confidence"] = dict.fromkeys(data["confidence"], 0.15)
        data["sources"] |= dict.fromkeys(_LINKS, f"{measured}, {ranks} ranks over gloo, one thread each")
    found = Device.from_data({"name": Path(file).stem, **data}, str(file))
    with open(file, "w", encoding="utf-8") as stream:
        yaml.safe_dump(data, stream, sort_keys=False)
    return found


def _of_ranks(data: dict[str, Any], ranks: int, samples: int, where: str) -> dict[str, Any]:
    """Ops, collectives, and what a parallelized model takes beside them, measured by ranks on this host."""
    found: dict[int, Any] = {}
    for rank, message in messages(measure_rank, ranks, samples, preload=("vescale.estimation",), one_device=False):
        found[rank] = message[1]
    ops = {name: _slowest([found[rank]["ops"][name] for rank in found]) for name in found[0]["ops"]}
    collectives = {
        name: _slowest([found[rank]["collectives"][name] for rank in found]) for name in found[0]["collectives"]
    }
    gather = collectives["all_gather"]
    own: dict[str, Any] = {
        "ops": ops,
        "collectives": collectives,
        "measured_ranks": ranks,
        "node_latency": gather[0][1],
        "node_bandwidth": gather[-1][0] / gather[-1][1],
        "ranks_per_node": max(ranks, os.cpu_count() or 1),
        "overlap": _overlap(gather[-1], ranks),
    }
    table = on_processors(Device.from_data({"name": "measured", **data, **own, "dtensor_seconds": 1.0}, where))
    alike, others = [], {}
    for number, reference in enumerate(references(ranks)):
        planned = estimate(reference.model(), reference.plan(), batch={"x": reference.shape}, device=table).time
        measured = [max(part) for part in zip(*(found[rank]["steps"][number] for rank in found))]
        if reference.shows is None:
            alike.append(_Measured(planned, *measured))
        else:
            others[reference.shows] = _Measured(planned, *measured)
    slower, own["dtensor_seconds"] = _fit(*alike, **others)
    own["ops"] = {name: [[size, seconds * slower] for size, seconds in points] for name, points in ops.items()}
    return own


@dataclass(frozen=True)
class _Measured:
    """Seconds of the parts of a reference's step, beside what is estimated of its ops."""

    planned: StepTime
    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the step, without collectives."""
        return self.forward + self.backward + self.optimizer - self.planned.exposed

    def busy(self, *phases: str) -> float:
        """Seconds of ops in a loop, of some phases or of all."""
        return sum(seconds for phase, seconds in self.planned.phases.items() if not phases or phase in phases)


def _fit(small: _Measured, large: _Measured, **others: _Measured) -> tuple[float, dict[str, float]]:
    """How many times as long ops take in a step as in a loop, where caches are warm, and the host's seconds for an op on
    DTensors by what it is for. The small and the large model have the same ops, so that the host takes the same for them.
    ``others``: by what their host does beside (:data:`vescale.estimation.HOST_KINDS`)."""
    slower = (large.seconds - small.seconds) / (large.busy() - small.busy())
    slower = min(max(slower, 1.0), 2.0)
    found: dict[str, float] = {}

    def learn(kind: str, seconds: float, count: float) -> None:
        found[kind] = max(seconds / count, 1e-7)

    counts = small.planned.on_dtensors
    learn("forward", small.forward - slower * small.busy("forward", "loss"), counts["forward"])
    learn("backward", small.backward - small.planned.exposed - slower * small.busy("backward"), counts["backward"])
    learn("optimizer", small.optimizer - slower * small.busy("optimizer"), counts["optimizer"])
    for kind, one in others.items():
        known = sum(found[name] * count for name, count in one.planned.on_dtensors.items() if name in found)
        learn(kind, one.seconds - slower * one.busy() - known, one.planned.on_dtensors[kind])
    return slower, found


def _slowest(of_ranks: list[list[list[float]]]) -> list[list[float]]:
    return [[points[0][0], *map(max, zip(*(p[1:] for p in points)))] for points in zip(*of_ranks)]


def _overlap(gather: list[float], ranks: int) -> float:
    """What of a collective's time needs no processor can pass beside ops; with cores that no rank uses, all of it."""
    if (os.cpu_count() or 1) >= 2 * ranks:
        return 1.0
    _, seconds, processor = gather
    return round(max(0.0, 1 - processor / seconds), 3)


def _seconds(call: Callable[[], Any], kind: str) -> float:
    """Of a call on this thread: processor seconds, the least of several series; of a GPU the median by the clock."""
    call()
    clock = time.thread_time if kind == "cpu" else time.perf_counter
    times = []
    for _ in range(_REPEATS):
        _wait(kind)
        begin, number = clock(), 0
        while clock() - begin < 0.005:
            call()
            number += 1
        _wait(kind)
        times.append((clock() - begin) / number)
    return min(times) if kind == "cpu" else statistics.median(times)


def _wait(kind: str) -> None:
    if kind != "cpu":
        torch.accelerator.synchronize()
