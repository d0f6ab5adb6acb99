"""Memory and seconds of a choice in closed form, from the profile of its ops.

Sizes of activations grow with the rows of a rank; parameters, gradients and optimizer states are divided by the ranks that
share them. ``tests/plan_search`` compares with :func:`vescale.estimate`.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from vescale.comm import CommRecord
from vescale.estimation import (
    Device,
    OpCosts,
    OpSeconds,
    host_seconds,
    loss_of,
    make_batch,
    make_optimizer,
    op_seconds,
    record_seconds,
    rehearse,
    step_of_stages,
    timeline_of,
)
from vescale.pipeline import Schedule, make_schedule
from vescale.plan_search._choice import REPLICAS, Choice
from vescale.plan_search._profile import Arrays, Profile, Unit
from vescale.plans import MeshAxes, Plan

# What an optimizer keeps and moves for each byte of a parameter, seen in steps of a small layer.


_WIDTH = 512  # of a square matrix: states for each element, not those of a fixed size, are almost all


@dataclass(frozen=True)
class OptimizerCost:
    """For each byte of a parameter: bytes of states, bytes that a step reads and writes, and bytes that it holds while it
    updates this parameter; ``num_ops``, and ``on_dtensors`` of them on DTensors, for each tensor."""

    state: float = 0.0
    moved: float = 0.0
    num_ops: float = 0.0
    temporary: float = 0.0
    on_dtensors: float = 0.0


def optimizer_cost(optimizer: Any, dtype: torch.dtype) -> OptimizerCost:
    """Raises ValueError for an unknown name, TypeError for what cannot be called.

    Args:
        optimizer: a name, a function of the parameters, or None.
        dtype: of the parameters.
    """
    maker = make_optimizer(optimizer)
    if maker is None:
        return OptimizerCost()
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=dtype))
    axes = {"dp": 1}
    x = make_batch(layer, {"input": torch.empty(2, _WIDTH, dtype=dtype, device="meta")})
    seen = rehearse(layer, Plan(axes), MeshAxes.of(axes), 0, x, maker, loss_of, num_steps=2)
    costs = OpCosts({key: calls for key, calls in seen.costs.by_key.items() if key[0] == "optimizer"})
    size = _WIDTH * _WIDTH * dtype.itemsize
    moved = sum(cost.num_bytes * cost.num_calls for _, cost in costs)
    timeline = timeline_of(seen, ())
    here = [n for n, instant in enumerate(timeline.instants) if (instant.step, instant.phase) == (1, "optimizer")]
    return OptimizerCost(
        sum(state.num_bytes for state in seen.states) / size,
        moved / size,
        sum(cost.num_calls for _, cost in costs),
        float(timeline.categories["temporary"][here].max()) / size,
        sum(n for key, n in seen.costs.on_dtensors.items() if key[0] == "optimizer"),
    )


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


# Figures of a choice with pipeline stages: from the profile of its ops, and the schedule that would run.
#
# The one model of pipelines in a search. A stage has an equal part of the blocks; what is before them counts for the first
# stage, what is after them for the last.


_PASSES = {"F": ("forward", "loss"), "B": ("backward", "recompute")}


@functools.lru_cache(maxsize=512)
def schedule_of(name: str, num_ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """The schedule of a pipeline. Raises PlanError for numbers that it does not take."""
    plan = Plan({"pp": num_ranks}).pipeline(
        balance="cost", schedule=name, microbatches=microbatches, stages_per_rank=stages_per_rank
    )
    assert plan.pipeline_entry is not None
    return make_schedule(plan.pipeline_entry, num_ranks, num_ranks * stages_per_rank)


def staged_figures(profile: Profile, choice: Choice, rows: int, setting: Setting) -> Figures:
    """Memory of the rank that needs most, and seconds of a step.

    Args:
        profile: of the choice's ops.
        rows: of a micro-batch, of each rank.
        setting: device and optimizer.
    """
    device, axes = setting.device, MeshAxes.of(choice.axes)
    schedule = schedule_of(choice.schedule, choice.pp, choice.stages_per_rank, choice.microbatches)
    num_stages = choice.pp * choice.stages_per_rank
    per_stage = math.ceil(profile.num_blocks / num_stages)
    own_blocks = min(per_stage * choice.stages_per_rank, profile.num_blocks)
    arrays = profile.arrays(max(per_stage, 2))
    peak = _stage_peak(profile, arrays, choice, schedule, per_stage, own_blocks, rows, setting)

    own = {
        (part, kind): scaled_ops(profile, rows, device, part, phases)
        for part in ("blocks", "early", "late")
        for kind, phases in _PASSES.items()
    }
    share = own_blocks / profile.num_blocks
    inner = outer_seconds = 0.0
    for record in profile.inner_records:
        scaled = CommRecord(record.op, record.num_ranks, int(record.bytes * rows / profile.rows), axes=record.axes)
        seconds = profile.times_of(record) * record_seconds(scaled, device, axes)
        if any(f"{one.path}." in record.requester for one in profile.repeats):
            inner += seconds * share
        else:
            outer_seconds += seconds
    # The last rank has the head and the loss beside its blocks.
    of_last = [(own[part, kind], times) for kind in _PASSES for part, times in (("blocks", share), ("late", 1.0))]
    compute = sum(ops.compute * times for ops, times in of_last)
    memory = sum(ops.memory * times for ops, times in of_last)
    message = CommRecord("message", 2, int(profile.message_bytes * rows / profile.rows), axes="pp")
    passes = 2 * choice.stages_per_rank

    def seconds_of(stage: int, kind: str) -> float:
        found = _seconds(own["blocks", kind]) * share / choice.stages_per_rank + inner / passes
        if stage == 0:
            found += _seconds(own["early", kind])
        if stage == num_stages - 1:
            found += _seconds(own["late", kind])
        return found + (outer_seconds / passes if schedule.rank_of[stage] == choice.pp - 1 else 0.0)

    busy = choice.microbatches * (compute + memory + inner + outer_seconds)
    whole = step_of_stages(schedule, seconds_of, record_seconds(message, device, axes))
    trained = arrays.trained / max(arrays.parameters, 1)
    parameters = _parameters(arrays, own_blocks, max(per_stage, 2))[1]
    updated = trained * parameters / (choice.dp if choice.zero else 1)
    update = updated * setting.optimizer.moved / (device.bandwidth * device.bandwidth_efficiency)
    hidden = parameter_seconds(profile, choice, profile.arrays(profile.num_blocks), axes, setting) * share
    # Every stage runs the forward around the blocks, and computes again what depends on the batch alone.
    times = {"blocks": share, "early": choice.stages_per_rank, "late": choice.stages_per_rank}
    num_ops = 0.0
    on_dtensors: defaultdict[str, float] = defaultdict(float)
    for (part, _), ops in own.items():
        num_ops += choice.microbatches * times[part] * ops.num_ops
        for name, count in ops.on_dtensors.items():
            on_dtensors[name] += choice.microbatches * times[part] * count
    terms = {
        "compute": choice.microbatches * compute,
        "memory": choice.microbatches * memory + update,
        "exposed": choice.microbatches * (inner + outer_seconds) + device.exposed(hidden, busy),
        "bubble": max(0.0, whole - busy),
        "host": host_of(profile, choice, setting, num_ops, on_dtensors, share),
    }
    return make_figures(peak, choice, device, terms)


def _seconds(ops: OpSeconds) -> float:
    return ops.compute + ops.memory


def _parameters(arrays: Arrays, own_blocks: int, num_blocks: int) -> tuple[float, float]:
    """Bytes of parameters, without ZeRO, of the first rank and of the last."""
    block = (arrays.parameters - arrays.outer_parameters) / num_blocks
    late = arrays.late_parameters
    return own_blocks * block + arrays.outer_parameters - late, own_blocks * block + late


def _stage_peak(
    profile: Profile,
    arrays: Arrays,
    choice: Choice,
    schedule: Schedule,
    per_stage: int,
    own_blocks: int,
    rows: int,
    setting: Setting,
) -> float:
    scale = rows / profile.rows
    trained = arrays.trained / max(arrays.parameters, 1)
    gathers = choice.zero and choice.dp > 1
    other = arrays.other * scale + (0 if gathers else arrays.casts)

    def saved(of: Arrays) -> float:
        return of.saved * scale + (0.0 if gathers else float(of.casts.max(initial=0)))

    more = profile.arrays(max(per_stage, 2) + 1) if profile.num_blocks > max(per_stage, 2) else profile.arrays(2)
    blocks = abs(saved(more) - saved(arrays)) or saved(arrays) / max(per_stage, 2)  # what a block keeps
    first, last = (
        states_of(parameters, trained * parameters, choice, setting)
        + (setting.gathered * parameters if gathers else 0.0)
        + trained * parameters * (setting.reduced if choice.zero else 1.0)
        for parameters in _parameters(arrays, own_blocks, max(per_stage, 2))
    )
    # Beside what its blocks keep: what every stage computes of the batch, and what it has sent on.
    each = per_stage * blocks + (arrays.early + profile.message_bytes) * scale
    kept = [max(count - 1, 0) * each for count in (schedule.peak[0], schedule.peak[-1])]
    less = max(2 - per_stage, 0) * blocks  # arrays have two blocks at least
    inside = other[arrays.in_blocks].max(initial=0) - less
    return float(max(first + kept[0] + inside, last + kept[1] + other.max(initial=0) - less))
