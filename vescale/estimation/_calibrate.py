"""Measures this machine and writes its table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from vescale.comm import messages
from vescale.compat import note
from vescale.errors import EstimateArgumentError
from vescale.estimation._devices import Device
from vescale.estimation._estimate import estimate
from vescale.estimation._reference_job import measure_rank, on_processors, references
from vescale.estimation._step_time import StepTime

__all__ = ["calibrate"]

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
        device: ``"cpu"`` or ``"cuda"``.
        ranks: processes of a host that measure collectives.
        samples: series of each measurement.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if ranks < 2:
        raise EstimateArgumentError(f"calibrate: ranks is {ranks}; collectives need at least 2")
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
    if kind == "cuda":
        data["memory_bytes"] = int(torch.cuda.get_device_properties(0).total_memory)
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
    if kind == "cuda":
        torch.cuda.synchronize()
