"""Figures of a choice with pipeline stages: from the profile of its ops, and the schedule that would run.

The one model of pipelines in a search. A stage has an equal part of the blocks; what is before them counts for the first
stage, what is after them for the last.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict

from vescale.comm import CommRecord
from vescale.estimation import OpSeconds, record_seconds, step_of_stages
from vescale.pipeline import Schedule, make_schedule
from vescale.plan_search._arrays import Arrays
from vescale.plan_search._choice import Choice
from vescale.plan_search._figures import (
    Figures,
    Setting,
    host_of,
    make_figures,
    parameter_seconds,
    scaled_ops,
    states_of,
)
from vescale.plan_search._profile import Profile
from vescale.plans import MeshAxes, Plan

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
    peak = _peak(profile, arrays, choice, schedule, per_stage, own_blocks, rows, setting)

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


def _peak(
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
