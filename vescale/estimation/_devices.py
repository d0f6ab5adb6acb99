"""``Device``: what a device can do, from a table in ``vescale/estimation/devices`` or in a file of the user's."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from vescale.errors import EstimateOptionError
from vescale.plans import MeshAxes, did_you_mean

_FOLDER = Path(__file__).parent / "devices"
_CURVES = ("ops", "collectives")

HOST_KINDS = ("forward", "backward", "recompute", "saving", "optimizer", "unit", "crossing")
"""For what the host of a parallelized model takes time beside its ops: ops on DTensors in a forward, in a backward, in a
recomputation, in a forward or a recomputation whose policy saves results of ops, and in the optimizer; gathers and
reductions of units; and tensors that enter or leave a local region."""


@dataclass(frozen=True)
class Efficiency:
    """Which share of the peak an op reaches: ``points`` are (operations of one call, share), in ascending order."""

    points: tuple[tuple[float, float], ...]

    def at(self, flops: float) -> float:
        """Linear in the logarithm of ``flops`` between the points."""
        points = self.points
        if flops <= points[0][0]:
            return points[0][1]
        for (low, first), (high, second) in itertools.pairwise(points):
            if flops <= high:
                share = (math.log(flops) - math.log(low)) / (math.log(high) - math.log(low))
                return first + share * (second - first)
        return points[-1][1]


@dataclass(frozen=True)
class Curve:
    """Measured seconds by size: ``points`` are (size, seconds) in ascending order of sizes."""

    points: tuple[tuple[float, ...], ...]

    def at(self, size: float) -> float:
        """Linear between the points, and beyond the largest in proportion to the size; below the smallest its seconds."""
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (low, first, *_), (high, second, *_) in itertools.pairwise(points):
            if size <= high:
                return first + (size - low) / (high - low) * (second - first)
        return points[-1][1] * size / points[-1][0]


@dataclass(frozen=True)
class Device:
    """See ``devices/schema.json`` for units and meanings; bytes, seconds, floating-point operations a second.

    Attributes:
        name: of the table.
        memory_bytes: None: not limited.
        rounding_bytes: blocks of the allocator are multiples of this number of bytes.
        flops: peak, by dtype.
        bandwidth: of the device's memory.
        efficiency: of matrix products; ``bandwidth_efficiency``: of ops that move memory.
        ranks_per_node: devices that ``node_bandwidth`` connects.
        node_bandwidth, node_latency, network_bandwidth, network_latency: of a rank, one way.
        op_seconds: host time of an op on a plain tensor; ``dtensor_seconds``: what one on DTensors takes beside, or by
            what it is for (:data:`vescale.estimation.HOST_KINDS`), then with what a gather or reduction of a unit takes.
        outside_bytes: memory outside of PyTorch's allocator, by name; ``communicator``: for each group.
        confidence: of the terms, a relative error.
        sources: the source of each number, by its key; "assumption" marks numbers that are neither published nor
            measured.
        overlap: the share of gathers and reductions of parameters that overlaps with compute.
        ops: of a measured host, seconds of a call by op: of its floating-point operations in float32, or of its bytes.
        collectives: of a measured host, seconds by collective, of the bytes that a rank receives among ``measured_ranks``.
    """

    name: str
    memory_bytes: int | None
    rounding_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    efficiency: Efficiency
    bandwidth_efficiency: float
    ranks_per_node: int
    node_bandwidth: float
    node_latency: float
    network_bandwidth: float
    network_latency: float
    op_seconds: float
    dtensor_seconds: float | Mapping[str, float]
    outside_bytes: Mapping[str, int]
    confidence: Mapping[str, float]
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    overlap: float = 1.0
    ops: Mapping[str, Curve] = field(default_factory=dict, repr=False)
    collectives: Mapping[str, Curve] = field(default_factory=dict, repr=False)
    measured_ranks: int = 2

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> Device:
        """Raises ValueError naming a key that is missing, unknown or of another type.

        Args:
            data: the table's values by name, as read from YAML.
            where: the table's file, for messages.
        """
        known = dict(cls.__annotations__)
        wrong = [key for key in data if key not in known]
        if wrong:
            raise EstimateOptionError(f"{where}: unknown key {wrong[0]!r}{did_you_mean(str(wrong[0]), tuple(known))}")
        missing = [key for key in known if key not in data and not hasattr(cls, key) and key not in _CURVES]
        if missing:
            raise EstimateOptionError(f"{where}: no {missing[0]!r}; see vescale/estimation/devices/schema.json")
        if not isinstance(data["name"], str):
            raise EstimateOptionError(f"{where}: name is {data['name']!r}; write a string")
        for key in ("flops", "outside_bytes", "confidence"):
            if not isinstance(data[key], Mapping) or not all(_is_number(x) and x >= 0 for x in data[key].values()):
                raise EstimateOptionError(f"{where}: {key} is {data[key]!r}; write a mapping from names to numbers")
        if not data["flops"] or not all(data["flops"].values()):
            raise EstimateOptionError(
                f"{where}: flops is {data['flops']!r}; write positive numbers by dtype, such as float32: 1e12"
            )
        for key in known:
            if known[key] not in ("float", "int", "int | None") or key not in data:
                continue
            value = data[key]
            if value is None and known[key] == "int | None":
                continue
            if not _is_positive(value) and not (key == "overlap" and _is_number(value) and value == 0):
                raise EstimateOptionError(f"{where}: {key} is {value!r}; write a positive number")
            if known[key] != "float" and value != int(value):
                raise EstimateOptionError(f"{where}: {key} is {value!r}; write an integer")
        host = data["dtensor_seconds"]
        by_kind = host if isinstance(host, Mapping) else {"forward": host}
        if (
            "forward" not in by_kind
            or not set(by_kind) <= set(HOST_KINDS)
            or not all(map(_is_positive, by_kind.values()))
        ):
            raise EstimateOptionError(
                f"{where}: dtensor_seconds is {host!r}; write a positive number, or one for 'forward' and others by "
                f"name: {', '.join(HOST_KINDS)}"
            )
        sources = data["sources"]
        if not isinstance(sources, Mapping) or not all(isinstance(x, str) for x in sources.values()):
            raise EstimateOptionError(
                f"{where}: sources is {sources!r}; write a mapping from keys of the table to strings"
            )
        points = data["efficiency"]
        if not _are_points(points, 2, 2) or not all(number > 0 for point in points for number in point):
            raise EstimateOptionError(
                f"{where}: efficiency is {points!r}; write a list of [operations of a call, share of the peak]"
            )
        values = {**data, "efficiency": Efficiency(tuple((float(f), float(s)) for f, s in sorted(points)))}
        for key in _CURVES:
            curves = data.get(key, {})
            if not isinstance(curves, Mapping) or not all(_are_points(one, 2, 3) for one in curves.values()):
                raise EstimateOptionError(f"{where}: {key} is {curves!r}; write lists of [size, seconds] by name")
            values[key] = {
                name: Curve(tuple(tuple(map(float, p)) for p in sorted(one))) for name, one in curves.items()
            }
        return cls(**values)

    @property
    def is_gpu(self) -> bool:
        """Whether PyTorch's caching allocator provides its memory, in blocks; a host's allocator provides the requested
        size."""
        return self.rounding_bytes > 1

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Peak floating-point operations a second in ``dtype``; those of float32 if the table does not have it."""
        name = str(dtype).removeprefix("torch.")
        return float(self.flops.get(name, self.flops.get("float32", max(self.flops.values()))))

    def link(self, num_ranks: int, stride: int) -> tuple[float, float]:
        """(bandwidth, latency) between ``num_ranks`` ranks whose numbers are ``stride`` apart."""
        inside = (num_ranks - 1) * stride < self.ranks_per_node
        if inside:
            return self.node_bandwidth, self.node_latency
        return self.network_bandwidth, self.network_latency

    def launch_seconds(self, num_ops: float) -> float:
        """What the host takes to launch ``num_ops`` ops on plain tensors; measured ops have it in their seconds."""
        return 0.0 if self.ops else num_ops * self.op_seconds

    def dtensor_op_seconds(self, kind: str) -> float:
        """What the host of a parallelized model takes for an op on DTensors, by what it is for, or for a unit's collective.

        Args:
            kind: of :data:`vescale.estimation.HOST_KINDS`.
        """
        if isinstance(self.dtensor_seconds, Mapping):
            return float(self.dtensor_seconds.get(kind, self.dtensor_seconds["forward"]))
        return 0.0 if kind in ("unit", "crossing") else self.dtensor_seconds

    def exposed(self, parameters: float, busy: float) -> float:
        """Of ``parameters`` seconds of collectives of parameters, those that ``busy`` seconds of ops do not hide."""
        return parameters - min(self.overlap * parameters, busy)

    def step_seconds(self, device: float, host: float) -> float:
        """The longer of ``device`` and ``host`` seconds for a GPU, which runs what its host has launched; the sum where ops
        run on the host."""
        return max(device, host) if self.is_gpu else device + host

    def outside(self, axes: MeshAxes) -> dict[str, int]:
        """Bytes outside of the allocator, by purpose; one communicator for each axis with several ranks.

        Args:
            axes: names and sizes of the mesh's axes.
        """
        groups = sum(size > 1 for size in axes.sizes)
        found = {name: int(size) for name, size in self.outside_bytes.items() if name != "communicator"}
        if groups and "communicator" in self.outside_bytes:
            found["communicators"] = groups * int(self.outside_bytes["communicator"])
        return found


def _are_points(points: Any, least: int, most: int) -> bool:
    return (
        isinstance(points, list)
        and bool(points)
        and all(isinstance(p, list) and least <= len(p) <= most and all(map(_is_number, p)) for p in points)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def device_names() -> tuple[str, ...]:
    """Names of the tables that come with vescale, for ``device=``."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def device_of(device: str | Device) -> Device:
    """A table by name, or from a YAML file. Raises ValueError naming the tables there are."""
    if isinstance(device, Device):
        return device
    file = _FOLDER / f"{device.lower()}.yaml"
    if device.endswith((".yaml", ".yml")) or os.sep in device:
        file = Path(device)
    if not file.is_file():
        raise EstimateOptionError(
            f"there is no table of a device {device!r}; pass one of {', '.join(device_names())}, or a YAML "
            f"file{did_you_mean(device.lower(), device_names())}"
        )
    try:
        with file.open(encoding="utf-8") as stream:
            data = yaml.safe_load(stream)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise EstimateOptionError(f"{file}: not readable as YAML: {reason}") from None
    if not isinstance(data, dict):
        raise EstimateOptionError(f"{file}: expected a mapping; see vescale/estimation/devices/schema.json")
    return Device.from_data({"name": file.stem, **data}, str(file))
