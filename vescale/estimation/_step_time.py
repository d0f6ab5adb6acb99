"""Seconds of a step: compute by a roofline, collectives by topology, what of them is exposed, and the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vescale.comm import CommRecord, ring_bytes
from vescale.estimation._bucket_gradients import bucket_shares
from vescale.estimation._devices import Device
from vescale.estimation._memory_log import RANDOM_FILLS, OpCost, OpCosts
from vescale.estimation._rehearsal import Rehearsal, is_of_parameters, names_block
from vescale.gradients import FLAGS_REQUESTER
from vescale.ir import Repeats
from vescale.plans import MeshAxes

_PHASES = ("forward", "loss", "backward", "recompute", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Terms of a step in steady state, in seconds.

    Attributes:
        compute: of matrix products and attention; ``memory``: of ops that move memory.
        collectives: of all collectives, by axes and op; ``exposed``: what compute does not hide.
        collective_bytes: what this rank receives, by axes and op.
        host: time of the host to launch everything; a step on a GPU takes at least this long, one on a
            host so much longer.
        bubble: idle time of a pipeline.
        flops: floating-point operations of this rank; ``peak_flops``: of the device in the dtype of most of them.
        tokens: of the global batch.
        confidence: relative error of each term, from the device's table.
        phases: by phase of a step, seconds of its ops; ``on_dtensors``: how many ops on DTensors by what they are for, and
            collectives of units.
        is_gpu: True if the host launches work that runs in parallel to it, so that the longer of the two counts.
    """

    compute: float
    memory: float
    collectives: Mapping[str, float]
    collective_bytes: Mapping[str, int]
    exposed: float
    host: float
    bubble: float
    flops: int
    peak_flops: float
    tokens: int
    confidence: Mapping[str, float]
    is_gpu: bool = True
    phases: Mapping[str, float] = field(default_factory=dict)
    on_dtensors: Mapping[str, float] = field(default_factory=dict)

    @property
    def device_seconds(self) -> float:
        """Compute, memory, exposed communication and bubble together."""
        return self.compute + self.memory + self.exposed + self.bubble

    @property
    def seconds(self) -> float:
        """The time of a step: on a GPU the longer of device and host, on a CPU both together."""
        return max(self.device_seconds, self.host) if self.is_gpu else self.device_seconds + self.host

    @property
    def mfu(self) -> float:
        """Share of the device's peak that a step's products and attention, recomputation included, come to."""
        return self.flops / self.peak_flops / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch in a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def terms(self) -> dict[str, Any]:
        """Plain data; each term with its confidence."""

        def term(seconds: float, kind: str) -> dict[str, float]:
            return {"seconds": seconds, "relative_error": float(self.confidence.get(kind, 0.5))}

        return {
            "compute": term(self.compute, "compute"),
            "memory": term(self.memory, "memory"),
            "collectives": {
                name: {**term(seconds, "communication"), "bytes": self.collective_bytes[name]}
                for name, seconds in self.collectives.items()
            },
            "exposed": term(self.exposed, "communication"),
            "host": term(self.host, "host"),
            "bubble": term(self.bubble, "compute"),
            "flops": self.flops,
            "mfu": self.mfu,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
        }


def step_time(
    rehearsal: Rehearsal,
    repeats: Sequence[Repeats],
    device: Device,
    axes: MeshAxes,
    batch: Mapping[str, Any],
    in_units: Collection[str] = (),
) -> StepTime:
    """Of the last step of a rehearsal, without the bubbles of a pipeline. ``in_units``: names of parameters of units."""
    ops = op_seconds(rehearsal.costs, repeats, device, trained=rehearsal.trained)
    compute, memory, flops = ops.compute, ops.memory, ops.flops
    seconds, num_bytes, hidden = collective_seconds(
        rehearsal.collectives, repeats, device, axes, bucket_shares(rehearsal.in_buckets, repeats), in_units
    )
    total = sum(seconds.values())
    # Gathers and reductions of parameters run beside the compute of other units; those of activations are waited for.
    exposed = total - hidden + device.exposed(hidden, compute + memory)
    on_dtensors = {**ops.on_dtensors, "unit": _num_of_units(rehearsal.collectives, repeats)}
    host = host_seconds(device, ops.num_ops, on_dtensors, math.prod(axes.sizes))
    return StepTime(
        compute,
        memory,
        seconds,
        num_bytes,
        exposed,
        host,
        0.0,
        flops,
        device.peak_flops(ops.dtype),
        _tokens(batch),
        device.confidence,
        device.is_gpu,
        ops.phases,
        on_dtensors,
    )


def host_seconds(device: Device, num_ops: float, on_dtensors: Mapping[str, float], num_ranks: int) -> float:
    """What the host of one of ``num_ranks`` ranks takes to launch ``num_ops`` ops on plain tensors, and for ops on DTensors
    beside, and collectives of units."""
    beside = sum(count * device.dtensor_op_seconds(kind) for kind, count in on_dtensors.items())
    return device.launch_seconds(num_ops) + (beside if num_ranks > 1 else 0.0)


@dataclass(frozen=True)
class OpSeconds:
    """Of ops: seconds, how many, floating-point operations, and the dtype of most of these; seconds by phase, and how many
    ops on DTensors there were by what they are for."""

    compute: float
    memory: float
    num_ops: float
    flops: int
    dtype: torch.dtype
    phases: Mapping[str, float]
    on_dtensors: Mapping[str, float]


def op_seconds(
    costs: OpCosts,
    repeats: Sequence[Repeats],
    device: Device,
    *,
    only: Callable[[str | None], bool] | None = None,
    trained: Mapping[str, int] | None = None,
) -> OpSeconds:
    """By a roofline: products and attention take what their operations take, or the memory that they move.

    Args:
        costs: of one step; ``only``: of the modules for which it is true.
        repeats: how often the ops of a block count.
        device: peaks and efficiencies.
        trained: elements of parameters by module, of which the optimizer saw those of one block for several.
    """
    compute = memory = num_ops = 0.0
    flops = 0
    optimizer = trained_share(trained or {}, repeats)
    by_dtype: dict[torch.dtype, int] = {}
    phases: dict[str, float] = {}
    on_dtensors: dict[str, float] = {}

    def times_of(phase: str, module: str | None) -> float:
        return optimizer if phase == "optimizer" else next((r.count for r in repeats if r.holds(module)), 1)

    for (kind, phase, module, _), count in costs.on_dtensors.items():
        if only is None or only(module):
            on_dtensors[kind] = on_dtensors.get(kind, 0.0) + count * times_of(phase, module)
    for (phase, module, _, dtype), cost in costs:
        if only is not None and not only(module):
            continue
        times = cost.num_calls * times_of(phase, module)
        seconds = call_seconds(cost, dtype, device)
        num_ops += times
        phases[phase] = phases.get(phase, 0.0) + times * seconds
        if cost.flops:
            compute += times * seconds
            flops += int(times * cost.flops)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + int(times * cost.flops)
        else:
            memory += times * seconds
    most = max(by_dtype, key=lambda dtype: by_dtype[dtype]) if by_dtype else torch.float32
    return OpSeconds(compute, memory, num_ops, flops, most, phases, on_dtensors)


def call_seconds(cost: OpCost, dtype: torch.dtype, device: Device) -> float:
    """Of one call of an op: what was measured, or by a roofline."""
    curve = device.ops.get(cost.name)
    if curve is None and not cost.flops:
        curve = device.ops.get("clone")  # of an op that was not measured
    if curve is not None and cost.name in RANDOM_FILLS:
        return curve.at(cost.num_bytes // dtype.itemsize * torch.float32.itemsize)
    if curve is not None:
        slower = device.peak_flops(torch.float32) / device.peak_flops(dtype) if cost.flops else 1.0
        return curve.at(cost.size) * slower
    seconds = cost.num_bytes / (device.bandwidth * device.bandwidth_efficiency)
    if cost.flops:
        seconds = max(seconds, cost.flops / (device.peak_flops(dtype) * device.efficiency.at(cost.flops)))
    return seconds


def trained_share(trained: Mapping[str, int], repeats: Sequence[Repeats]) -> float:
    """How many times as much as what was run the optimizer updates, and buckets of gradients hold."""
    of_all = sum(n * next((r.count for r in repeats if r.holds(path)), 1) for path, n in trained.items())
    return of_all / sum(trained.values()) if of_all else 1.0


def record_seconds(record: CommRecord, device: Device, axes: MeshAxes) -> float:
    """Of one collective: latency of its rounds, and its bytes over the slowest link.

    Args:
        record: op, ranks, bytes and axes.
        device: links; ``axes``: which ranks are near each other.
    """
    name = record.op.removesuffix("_v")
    stride = _stride(record.axes, axes)
    curve = device.collectives.get("send" if name in ("recv", "message") else name)
    if curve is not None and (record.num_ranks - 1) * stride < device.ranks_per_node:
        more = _rounds(name, record.num_ranks) / _rounds(name, device.measured_ranks)
        return curve.at(record.bytes) + (more - 1) * curve.points[0][1]
    bandwidth, latency = device.link(record.num_ranks, stride)
    steps = (2 if record.op == "all_reduce" else 1) * _rounds(name, record.num_ranks)
    return steps * latency + record.bytes / bandwidth


def _rounds(name: str, num_ranks: int) -> int:
    return 1 if name in ("all_to_all", "send", "recv", "message") else math.ceil(math.log2(max(num_ranks, 2)))


def seconds_of_stages(rehearsal: Rehearsal, repeats: Sequence[Repeats], device: Device) -> dict[tuple[int, str], float]:
    """Compute and memory of a step's forwards (``F``), backwards (``B``), and second halves of backwards (``W``)."""
    found: dict[tuple[int, str], float] = {}
    for (phase, module, stage, dtype), cost in rehearsal.costs:
        if stage is None:
            continue
        seconds = call_seconds(cost, dtype, device)
        times = cost.num_calls * next((r.count for r in repeats if r.holds(module)), 1)
        key = stage, "F" if phase in ("forward", "loss") else "W" if phase == "weights" else "B"
        found[key] = found.get(key, 0.0) + times * seconds
    return found


def collective_seconds(
    records: Sequence[CommRecord],
    repeats: Sequence[Repeats],
    device: Device,
    axes: MeshAxes,
    shares: Mapping[str, float],
    in_units: Collection[str] = (),
) -> tuple[dict[str, float], dict[str, int], float]:
    """(seconds, bytes) by axes and op, and the seconds of those that belong to parameters.

    ``shares``: how many times as much as in what was run a bucket reduces, by requester. ``in_units``: names of parameters
    of units, of whose gradients ranks tell each other with a byte each whether there are any.
    """
    left_out = tuple(f"{path}." for r in repeats for path in list(r.paths())[1:])
    num_flags = sum(name.startswith(left_out) for name in in_units) if left_out else 0
    seconds: dict[str, float] = {}
    num_bytes: dict[str, int] = {}
    hidden = 0.0
    for record in records:
        times: float = next((r.count for r in repeats if names_block(record.requester, r)), 1)
        if record.requester.startswith("bucket"):
            times = shares.get(record.requester, 1.0)
        elif record.requester == FLAGS_REQUESTER and num_flags:
            record = replace(record, bytes=record.bytes + ring_bytes(record.op, num_flags, record.num_ranks))
        own = times * record_seconds(record, device, axes)
        name = f"{record.axes or 'world'} {record.op.removesuffix('_v')}"
        seconds[name] = seconds.get(name, 0.0) + own
        num_bytes[name] = num_bytes.get(name, 0) + round(times * record.bytes)
        if record.op in ("send", "recv") or is_of_parameters(record.requester):
            hidden += own
    return dict(sorted(seconds.items())), dict(sorted(num_bytes.items())), hidden


def _num_of_units(records: Sequence[CommRecord], repeats: Sequence[Repeats]) -> float:
    """How many gathers and reductions of units there are."""
    own = (r for r in records if is_of_parameters(r.requester) and not r.requester.startswith("bucket"))
    return sum(next((one.count for one in repeats if names_block(r.requester, one)), 1) for r in own)


def _stride(names: str, axes: MeshAxes) -> int:
    """How far apart the ranks of a group are numbered."""
    own = [name for name in names.split(",") if name in axes.names]
    if not own:
        return 1
    last = max(axes.index(name) for name in own)
    return math.prod(axes.sizes[last + 1 :])


def _tokens(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    first = (
        ids if isinstance(ids, torch.Tensor) else next((x for x in batch.values() if isinstance(x, torch.Tensor)), None)
    )
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[0]
