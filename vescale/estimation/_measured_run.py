"""``MeasuredRun``: seconds of a step of a run, read from a trace of its collectives and a profile."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vescale.errors import EstimateArgumentError

__all__ = ["MeasuredRun", "read_run"]

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
