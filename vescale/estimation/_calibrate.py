"""Measures this machine and writes its table."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
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
from vescale.comm import messages
from vescale.compat import note
from vescale.errors import ArgumentError
from vescale.estimation._devices import Curve, Device
from vescale.estimation._estimate import estimate
from vescale.estimation._measured_ops import measure_collectives, measure_ops
from vescale.estimation._step_time import StepTime
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

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
