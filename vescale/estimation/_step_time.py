"""Seconds of a step: compute by a roofline, collectives by topology, what of them is exposed, and the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale.comm import CommRecord
from vescale.estimation._depth import Repeats
from vescale.estimation._devices import Device
from vescale.estimation._op_costs import OpCosts
from vescale.estimation._rehearsal import Rehearsal
from vescale.plans import MeshAxes

__all__ = [
    "OpSeconds",
    "StepTime",
    "collective_seconds",
    "is_of_parameters",
    "names_block",
    "op_seconds",
    "record_seconds",
    "step_time",
    "trained_share",
]

_PHASES = ("forward", "loss", "backward", "recompute", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Terms of a step in steady state, in seconds.

    Attributes:
        compute: of matrix products and attention; ``memory``: of ops that move memory.
        collectives: of all collectives, by axes and op; ``exposed``: what compute does not hide.
        host: time of the host to launch everything; the step takes at least this long.
        bubble: idle time of a pipeline.
        flops: floating-point operations of this rank; ``peak_flops``: of the device in the dtype of most of them.
        tokens: of the global batch.
        confidence: relative error of each term, as the device's table says.
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

    @property
    def device_seconds(self) -> float:
        return self.compute + self.memory + self.exposed + self.bubble

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.host)

    @property
    def mfu(self) -> float:
        """Share of the device's peak that a step's products and attention, recomputation included, come to."""
        return self.flops / self.peak_flops / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
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
    model: nn.Module,
    batch: Mapping[str, Any],
) -> StepTime:
    """Of the last step of a rehearsal."""
    ops = op_seconds(rehearsal.costs, repeats, device, trained=rehearsal.trained)
    compute, memory, flops = ops.compute, ops.memory, ops.flops
    seconds, num_bytes, hidden = collective_seconds(
        rehearsal.collectives, repeats, device, axes, trained_share(rehearsal.trained, repeats)
    )
    total = sum(seconds.values())
    # Gathers and reductions of parameters run beside the compute of other units; those of activations are waited for.
    exposed = total - hidden + max(0.0, hidden - (compute + memory))
    host = ops.num_ops * (device.op_seconds + (device.dtensor_seconds if math.prod(axes.sizes) > 1 else 0.0))
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
    )


@dataclass(frozen=True)
class OpSeconds:
    """Of ops: seconds, how many, floating-point operations, and the dtype of most of these."""

    compute: float
    memory: float
    num_ops: float
    flops: int
    dtype: torch.dtype


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
    for (phase, module, _, dtype), cost in costs:
        if only is not None and not only(module):
            continue
        repeated: float = next((r.count for r in repeats if r.holds(module)), 1)
        times = cost.num_calls * (optimizer if phase == "optimizer" else repeated)
        moved = cost.num_bytes / (device.bandwidth * device.bandwidth_efficiency)
        num_ops += times
        if cost.flops:
            product = cost.flops / (device.peak_flops(dtype) * device.efficiency.at(cost.flops))
            compute += times * max(product, moved)
            flops += int(times * cost.flops)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + int(times * cost.flops)
        else:
            memory += times * moved
    most = max(by_dtype, key=lambda dtype: by_dtype[dtype]) if by_dtype else torch.float32
    return OpSeconds(compute, memory, num_ops, flops, most)


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
    bandwidth, latency = device.link(record.num_ranks, _stride(record.axes, axes))
    passes = 2 if record.op == "all_reduce" else 1
    steps = passes * (1 if record.op == "all_to_all_v" else math.ceil(math.log2(max(record.num_ranks, 2))))
    return steps * latency + record.bytes / bandwidth


def collective_seconds(
    records: Sequence[CommRecord], repeats: Sequence[Repeats], device: Device, axes: MeshAxes, trained: float = 1.0
) -> tuple[dict[str, float], dict[str, int], float]:
    """(seconds, bytes) by axes and op, and the seconds of those that belong to parameters."""
    seconds: dict[str, float] = {}
    num_bytes: dict[str, int] = {}
    hidden = 0.0
    for record in records:
        times: float = next((r.count for r in repeats if names_block(record.requester, r)), 1)
        if record.requester.startswith("bucket"):
            times = trained
        own = times * record_seconds(record, device, axes)
        name = f"{record.axes or 'world'} {record.op.removesuffix('_v')}"
        seconds[name] = seconds.get(name, 0.0) + own
        num_bytes[name] = num_bytes.get(name, 0) + int(times * record.bytes)
        if is_of_parameters(record.requester):
            hidden += own
    return dict(sorted(seconds.items())), dict(sorted(num_bytes.items())), hidden


def names_block(requester: str, repeats: Repeats) -> bool:
    """Whether a collective's requester is the block that stands for others, or inside of it."""
    return (
        repeats.stand_in in requester and f"{repeats.stand_in}." in f"{requester.replace(' ', '.').replace(':', '.')}."
    )


def is_of_parameters(requester: str) -> bool:
    """Whether a collective moves parameters or their gradients, which compute hides."""
    return requester.startswith("bucket") or ("<" not in requester and ": " not in requester)


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
