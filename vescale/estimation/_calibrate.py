"""Measures this machine and writes its table."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from vescale.estimation._devices import Device

__all__ = ["calibrate"]

_REPEATS = 5
_MEASURED = ("flops", "efficiency", "bandwidth", "bandwidth_efficiency", "op_seconds")


def calibrate(file: str | os.PathLike[str], device: str | None = None) -> Device:
    """Time matrix products of several sizes, copies, and ops on small tensors, and write a table to ``file``.

    Collectives are those of the CPU's default table, or typical of the GPU, because other ranks would be needed.

    A few seconds. Raises OSError where the file cannot be written.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = ("float32", "bfloat16", "float64") if kind == "cpu" else ("float32", "bfloat16", "float16")
    flops, points = {}, []
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
    found = Device.from_data({"name": Path(file).stem, **data}, str(file))
    with open(file, "w", encoding="utf-8") as stream:
        yaml.safe_dump(data, stream, sort_keys=False)
    return found


def _seconds(call: Callable[[], Any], kind: str) -> float:
    """The median of several timings of a few calls."""
    call()
    times = []
    for _ in range(_REPEATS):
        _wait(kind)
        begin, number = time.perf_counter(), 0
        while time.perf_counter() - begin < 0.01:
            call()
            number += 1
        _wait(kind)
        times.append((time.perf_counter() - begin) / number)
    return statistics.median(times)


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
