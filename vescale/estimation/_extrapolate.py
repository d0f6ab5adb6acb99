"""``extrapolate``: seconds of a step at a larger scale, from a run at a small one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from vescale.errors import EstimateArgumentError
from vescale.estimation._estimate import Estimate
from vescale.estimation._measured_run import MeasuredRun, Trace, read_run

__all__ = ["Extrapolation", "ScaledTerm", "extrapolate"]


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
