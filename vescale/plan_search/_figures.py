"""Memory and seconds of a choice in closed form, from the profile of its ops.

Sizes of activations grow with the rows of a rank; parameters, gradients and optimizer states are divided by the ranks that
share them. ``tests/plan_search`` compares with :func:`vescale.estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from vescale.comm import CommRecord
from vescale.estimation import Device, OpCosts, OpSeconds, host_seconds, op_seconds, record_seconds
from vescale.plan_search._arrays import Arrays, Unit
from vescale.plan_search._choice import REPLICAS, Choice
from vescale.plan_search._optimizer_cost import OptimizerCost
from vescale.plan_search._profile import Profile
from vescale.plans import MeshAxes


@dataclass(frozen=True)
class Figures:
    """Memory and time of a step, on the rank that needs most.

    Attributes:
        peak_bytes: the peak of PyTorch's allocator.
        needed_bytes: the same, and what a device holds outside of the allocator.
        terms: the seconds of ``compute``, ``memory``, ``exposed`` communication, pipeline ``bubble`` and ``host``.
        step_seconds: the estimated time of the step, from these terms.
        is_exact: True if :func:`vescale.estimate` has run this plan; otherwise the figures are computed in closed form.
    """

    peak_bytes: int
    needed_bytes: int
    terms: Mapping[str, float]
    step_seconds: float
    is_exact: bool = False


@dataclass(frozen=True)
class Setting:
    """What all choices of a search have in common.

    Attributes:
        device: what they run on; ``optimizer``: what it keeps.
        gathered, reduced: bytes of a gathered parameter, and of a gradient that is reduced, for each byte of a parameter.
    """

    device: Device
    optimizer: OptimizerCost
    gathered: float = 1.0
    reduced: float = 1.0


def figures_of(profile: Profile, choice: Choice, rows: int, setting: Setting) -> Figures:
    """Of a choice without stages.

    Args:
        profile: of the choice's ops.
        rows: of the batch, of each rank.
        setting: device and optimizer.
    """
    arrays = profile.arrays(profile.num_blocks)
    peak = _peak(arrays, choice, rows / profile.rows, setting)
    ops = scaled_ops(profile, rows, setting.device)
    waited, hidden = communication(profile, choice, rows, arrays, setting)
    trained = arrays.trained / (choice.dp if choice.zero else 1)
    device = setting.device
    memory = ops.memory + trained * setting.optimizer.moved / (device.bandwidth * device.bandwidth_efficiency)
    terms = {
        "compute": ops.compute,
        "memory": memory,
        "exposed": max(0.0, waited + device.exposed(hidden, ops.compute + memory)),
        "bubble": 0.0,
        "host": host_of(profile, choice, setting, ops.num_ops, ops.on_dtensors),
    }
    return make_figures(peak, choice, device, terms)


def make_figures(peak: float, choice: Choice, device: Device, terms: Mapping[str, float]) -> Figures:
    outside = sum(device.outside(MeshAxes.of(choice.axes)).values())
    seconds = device.step_seconds(sum(value for name, value in terms.items() if name != "host"), terms["host"])
    return Figures(math.ceil(peak), math.ceil(peak) + outside, terms, seconds)


def host_of(
    profile: Profile,
    choice: Choice,
    setting: Setting,
    num_ops: float,
    on_dtensors: Mapping[str, float],
    share: float = 1.0,
) -> float:
    """Seconds of the host, with those of the optimizer and of the units.

    Args:
        num_ops: of a step without the optimizer; ``on_dtensors``: of them, by what they are for.
        share: of the parameters and units that a rank has.
    """
    optimizer, tensors = setting.optimizer, share * profile.num_tensors
    every = {**on_dtensors, "optimizer": on_dtensors.get("optimizer", 0.0) + tensors * optimizer.on_dtensors}
    if choice.zero and choice.dp > 1:
        every["unit"] = share * num_of_units(profile, choice)
    return host_seconds(setting.device, num_ops + tensors * optimizer.num_ops, every, math.prod(choice.axes.values()))


def num_of_units(profile: Profile, choice: Choice) -> float:
    """Gathers and reductions of units in a step."""
    arrays = profile.arrays(profile.num_blocks)
    twice = choice.zero == 3 and choice.pp == 1
    return 2 + sum(one.times * (3 if twice and one.runs_backward else 2) for one in arrays.units)


def scaled_ops(
    profile: Profile, rows: int, device: Device, only: str = "", phases: Collection[str] | None = None
) -> OpSeconds:
    """Of all ops, or those of a part of the model (``only``, as in :meth:`Profile.part_of`), with so many rows. ``phases``:
    of a step; None: all."""
    key = (rows, only, "" if phases is None else ",".join(phases))
    if key not in profile.ops:
        scale = rows / profile.rows
        costs = OpCosts()
        for (phase, module, stage, op, dtype, flops, moved), calls in profile.rehearsal.costs.by_key.items():
            if phases is None or phase in phases:
                own = (phase, module, stage, op, dtype, int(flops * scale), int(moved * scale))
                costs.by_key[own] = costs.by_key.get(own, 0) + calls
        costs.on_dtensors = {
            key: n for key, n in profile.rehearsal.costs.on_dtensors.items() if phases is None or key[1] in phases
        }
        chosen = (lambda module: profile.part_of(module) == only) if only else None
        profile.ops[key] = op_seconds(costs, profile.repeats, device, only=chosen)
    return profile.ops[key]


def _peak(arrays: Arrays, choice: Choice, scale: float, setting: Setting) -> float:
    """The most at any instant of a step."""
    other = arrays.other * scale
    rest = states_of(arrays.parameters, arrays.trained, choice, setting)
    updated = setting.optimizer.temporary * arrays.largest
    if not choice.zero or choice.dp == 1:
        running = rest + arrays.gradients + arrays.casts + other
        return float(max(running.max(), rest + arrays.trained + updated))
    outer, share = arrays.outer_parameters, arrays.outer_share
    gathered = setting.gathered * (outer + (arrays.running if choice.zero == 3 else arrays.waiting))
    # Gradients are there whole until they are reduced, those of the outer modules until the backward ends; then where the
    # gathered parameters were.
    whole = arrays.of_unit + np.where(arrays.in_backward, share * arrays.late_parameters, 0)
    running = rest + gathered + arrays.reduced / choice.dp + setting.reduced * whole + other
    last = outer * (setting.gathered + 2 * share * setting.reduced)
    updated = min(updated, setting.optimizer.temporary * arrays.parameters / choice.dp)
    return float(max(running.max(), rest + arrays.trained / choice.dp + max(last, updated)))


def communication(profile: Profile, choice: Choice, rows: int, arrays: Arrays, setting: Setting) -> tuple[float, float]:
    """(seconds of what a rank waits for, seconds of gathers and reductions of parameters, which run beside the ops)."""
    axes, device = MeshAxes.of(choice.axes), setting.device
    waited = 0.0
    for record in profile.inner_records:
        scaled = CommRecord(record.op, record.num_ranks, int(record.bytes * rows / profile.rows), axes=record.axes)
        waited += profile.times_of(record) * record_seconds(scaled, device, axes)
    return waited, parameter_seconds(profile, choice, arrays, axes, setting)


def parameter_seconds(profile: Profile, choice: Choice, arrays: Arrays, axes: MeshAxes, setting: Setting) -> float:
    """Of gathers of parameters, and reductions of gradients."""
    ranks = choice.dp if choice.zero else 1
    records = []
    for record in profile.gradient_records:
        names = record.axes.split(",")
        if "dp" not in names:
            records.append((profile.times_of(record), record))
            continue
        own = record.num_ranks // profile.data_ranks * choice.dp * choice.replicas
        if own > 1 and (ranks == 1 or not record.requester.startswith("bucket")):  # units reduce what buckets would
            share = (own - 1) / own / ((record.num_ranks - 1) / record.num_ranks)
            records.append((profile.times_of(record), _record(record.op, own, record.bytes * share, record.axes)))
    if ranks > 1:
        every = choice.dp * choice.replicas
        marks = 2 * (every - 1) / every * profile.num_tensors  # which parameters got a gradient
        records.append((1, _record("all_reduce", every, marks, f"{REPLICAS},dp" if choice.replicas > 1 else "dp")))
        part = (ranks - 1) / ranks
        gathers_twice = choice.zero == 3 and choice.pp == 1
        replicas = (choice.replicas - 1) / choice.replicas
        own_units = [(one, one.times * (2 if gathers_twice and one.runs_backward else 1)) for one in arrays.units]
        outer = Unit(arrays.outer_parameters, arrays.outer_parameters * arrays.outer_share, 1, True)
        for unit, gathered in (*own_units, (outer, 1)):
            for bucket in (unit.trained, unit.num_bytes - unit.trained):  # frozen parameters are one of their own
                if bucket:
                    records.append((gathered, _record("all_gather_v", ranks, bucket * setting.gathered * part, "dp")))
            reduced = unit.trained * setting.reduced
            if reduced:
                records.append((unit.times, _record("reduce_scatter_v", ranks, reduced * part, "dp")))
            if reduced and choice.replicas > 1:
                records.append(
                    (unit.times, _record("all_reduce", choice.replicas, 2 * reduced / ranks * replicas, REPLICAS))
                )
    return sum(times * record_seconds(record, setting.device, axes) for times, record in records)


def _record(op: str, num_ranks: int, num_bytes: float, axes: str) -> CommRecord:
    return CommRecord(op, num_ranks, int(num_bytes), axes=axes)


def states_of(parameters: float, gradients: float, choice: Choice, setting: Setting) -> float:
    """Bytes of parameters and optimizer states at rest, of a rank that has so many without ZeRO."""
    return (parameters + gradients * setting.optimizer.state) / (choice.dp if choice.zero else 1)
