"""``extrapolate``: seconds of a step at a larger scale, from a run at a small one."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vescale.errors import EstimateArgumentError
from vescale.estimation._estimate import Estimate

# ``MeasuredRun``: seconds of a step of a run, read from a trace of its collectives and a profile.

Interval = tuple[float, float]
_COMMUNICATION = ("c10d", "_c10d", "gloo", "nccl", "record_param_comms")


class Trace(Protocol):
    """A trace as ``vescale.debug.comm_trace`` gives it."""

    def events(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class MeasuredRun:
    """Of one step, in seconds; the median of the ranks in the trace.

    Attributes:
        step: from one step to the next.
        busy: in which something is computed; None: there was no profile.
        communicating: in which at least one collective runs.
        collectives: by axes and op, each from its start to its end.
    """

    step: float
    busy: float | None
    communicating: float
    collectives: Mapping[str, float]


def read_run(
    trace: Trace | str | os.PathLike[str],
    profile: str | os.PathLike[str] | None,
    step_seconds: float | None,
    steps: int,
) -> MeasuredRun:
    """See :func:`vescale.estimation.extrapolate`. Raises ValueError for files of another form, and without a step's time."""
    if steps < 1:
        raise EstimateArgumentError(f"steps is {steps}; give how many steps the trace has")
    events = trace.events() if not isinstance(trace, str | os.PathLike) else _events(trace)
    operations = [e for e in events if e.get("ph") == "X" and "bytes" in e.get("args", {})]
    by_rank: dict[Any, list[dict[str, Any]]] = {}
    for event in operations:
        by_rank.setdefault(event.get("pid"), []).append(event)
    names = sorted({_name(e) for e in operations})
    collectives = {
        name: statistics.median(sum(e["dur"] for e in own if _name(e) == name) for own in by_rank.values())
        / 1e6
        / steps
        for name in names
    }
    together = [_length(_interval(e) for e in own) for own in by_rank.values()]
    busy = None
    if profile is not None:
        profiled = [e for e in _events(profile) if e.get("ph") == "X"]
        busy = _busy(profiled) / steps
        marks = [e["dur"] for e in profiled if str(e.get("name", "")).startswith("ProfilerStep")]
        if step_seconds is None:
            spans = [_interval(e) for e in profiled]
            whole = max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
            step_seconds = (statistics.median(marks) if marks else whole / steps) / 1e6
    if not step_seconds:
        raise EstimateArgumentError("the time of a step is not known; give step_seconds= or profile=")
    return MeasuredRun(step_seconds, busy, statistics.median(together or [0.0]) / steps, collectives)


def _events(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    try:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
        found = data["traceEvents"] if isinstance(data, dict) else data
        return [event for event in found if isinstance(event, dict)]
    except (KeyError, TypeError, ValueError) as error:
        raise EstimateArgumentError(
            f"{os.fspath(file)} is no trace ({type(error).__name__}: {error}): give one of comm_trace(save=...) as trace=, "
            "and one of export_chrome_trace as profile="
        ) from None


def _name(event: Mapping[str, Any]) -> str:
    op = str(event.get("cat", "")).removesuffix("_v")
    return f"{event['args'].get('axis') or 'world'} {op}"


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals, in microseconds, covers."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total / 1e6


def _busy(events: list[dict[str, Any]]) -> float:
    """Of kernels, or, where there are none, of ops on the host."""
    kernels = [e for e in events if e.get("cat") == "kernel"]
    chosen = kernels or [e for e in events if e.get("cat") == "cpu_op"]
    return _length(_interval(e) for e in chosen if not str(e["name"]).lower().startswith(_COMMUNICATION))


@dataclass(frozen=True)
class ScaledTerm:
    """One term of a step.

    Attributes:
        name: ``compute``, ``exposed``, ``bubble``, ``other``, ``host``, or the axes and op of collectives.
        measured: seconds at the small scale; None: they were not measured.
        seconds: at the large scale.
        assumption: what the second follows from.
    """

    name: str
    measured: float | None
    seconds: float
    assumption: str


@dataclass(frozen=True)
class Extrapolation:
    """See :func:`extrapolate`.

    Attributes:
        measured: the small run.
        terms: that add up to a step, ``host`` aside; ``collectives``: seconds from start to end, hidden ones included.
    """

    measured: MeasuredRun
    terms: tuple[ScaledTerm, ...]
    collectives: tuple[ScaledTerm, ...]

    @property
    def step_seconds(self) -> float:
        """The sum of the terms, or what the host takes, if that is longer."""
        of = {term.name: term.seconds for term in self.terms}
        return max(sum(seconds for name, seconds in of.items() if name != "host"), of["host"])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "measured_step_seconds": self.measured.step,
            "step_seconds": self.step_seconds,
            "terms": [vars(term) for term in self.terms],
            "collectives": [vars(term) for term in self.collectives],
        }

    def __str__(self) -> str:
        lines = [f"a step takes {self.measured.step:.4g} s where it was measured, {self.step_seconds:.4g} s at scale"]
        for term in (*self.terms, *self.collectives):
            before = "not measured" if term.measured is None else f"{term.measured:.4g} s"
            lines.append(f"  {term.name}: {before} -> {term.seconds:.4g} s; {term.assumption}")
        return "\n".join(lines)


def extrapolate(
    small: Estimate,
    large: Estimate,
    trace: Trace | str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    step_seconds: float | None = None,
    steps: int = 1,
) -> Extrapolation:
    """Seconds of a step at a scale that has not run, with the assumption of each term.

    Each measured term is multiplied by how much the estimates say that it grows, so that what the device's table has wrong
    at both scales cancels. Communication: none.

    Args:
        small: the estimate of what was measured; ``large``: of what is asked for, by ``small.again(plan=..., batch=...)``.
        trace: of ``vescale.debug.comm_trace``, or a file that it has saved, with ``steps`` whole steps.
        profile: a file of ``torch.profiler``'s ``export_chrome_trace`` of one rank, with as many steps. None: what of the
            collectives is exposed is taken from the estimate.
        step_seconds: time of a step, if the profile should not tell.
        steps: in the trace, and in the profile.

    Raises ValueError where the time of a step is not known, or the estimates are of different devices.
    """
    if small.device != large.device:
        raise EstimateArgumentError(
            f"the estimates are for {small.device.name} and {large.device.name}; give two of the device that was measured"
        )
    run = read_run(trace, profile, step_seconds, steps)
    before, after = small.time, large.time
    collectives = tuple(_collectives(small, large, run))
    growth = _ratio(after.compute + after.memory, before.compute + before.memory)
    if run.busy is not None:
        busy, source = min(run.busy, run.step), "measured busy time"
    else:
        modelled = sum(before.collectives.values())
        share = before.exposed / modelled if modelled else 0.0
        busy, source = max(0.0, run.step - share * run.communicating), "measured step without exposed collectives"
    waited = min(run.communicating, run.step - busy)
    other = max(0.0, run.step - busy - waited)
    hidden = run.communicating - waited
    overlap = _ratio(run.communicating, sum(run.collectives.values())) if run.collectives else 1.0
    total = overlap * sum(term.seconds for term in collectives)
    terms = (
        ScaledTerm(
            "compute",
            busy,
            busy * growth,
            f"{source}, times {growth:.3g}: the estimates' ratio of compute and memory of a rank",
        ),
        ScaledTerm(
            "exposed",
            waited,
            max(0.0, total - hidden * growth),
            f"compute hides as large a part of its own time as before ({_share(hidden, busy)}), and collectives overlap "
            "each other as before",
        ),
        ScaledTerm(
            "bubble",
            None,
            after.bubble * _ratio(busy, before.compute + before.memory),
            "the dry run of the schedule, with seconds scaled to the measured ones",
        ),
        ScaledTerm("other", other, other, "neither computed nor communicated (input, host): the same at every scale"),
        ScaledTerm("host", None, after.host, "the device's table: ops of a rank times seconds of an op; a lower bound"),
    )
    return Extrapolation(run, terms, collectives)


def _collectives(small: Estimate, large: Estimate, run: MeasuredRun) -> list[ScaledTerm]:
    found = []
    for name, seconds in large.time.collectives.items():
        measured, modelled = run.collectives.get(name), small.time.collectives.get(name)
        size = large.time.collective_bytes[name]
        if measured is None or not modelled:
            text = f"not in the measured run: {size:,} bytes by the table of {large.device.name}"
            found.append(ScaledTerm(name, None, seconds, text))
            continue
        growth = seconds / modelled
        sizes = f"{small.time.collective_bytes[name]:,} and {size:,} bytes"
        text = f"measured, times {growth:.3g}: the table's ratio for {sizes}"
        axes = name.split(" ")[0].split(",")
        if _is_inside(small, axes) and not _is_inside(large, axes):
            text += "; the ranks are on several nodes now, whose links were not measured"
        found.append(ScaledTerm(name, measured, measured * growth, text))
    return found


def _is_inside(estimate: Estimate, axes: list[str]) -> bool:
    """Whether the ranks of a group are on one node."""
    sizes = dict(zip(estimate.axes.names, estimate.axes.sizes))
    first = next((n for n, name in enumerate(estimate.axes.names) if name in axes and sizes[name] > 1), None)
    return first is None or math.prod(estimate.axes.sizes[first:]) <= estimate.device.ranks_per_node


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "nothing"
