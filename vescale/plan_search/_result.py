"""What a search has found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vescale.estimation import Device
from vescale.plan_search._candidates import Rejected
from vescale.plan_search._choice import Choice, Model, plan_of
from vescale.plan_search._figures import Figures
from vescale.plans import Plan

__all__ = ["Proposal", "Search"]


@dataclass(frozen=True)
class Proposal:
    """A plan that fits.

    Attributes:
        choice: the mesh, the stage of ZeRO, checkpointing and pipeline stages.
        figures: memory and time of a step.
    """

    choice: Choice
    figures: Figures
    _model: Model = field(repr=False)
    _precision: str | None = field(default=None, repr=False)

    def plan(self) -> Plan:
        """A new plan, to print, edit, write (``to_yaml()``) or give to :func:`vescale.parallelize`."""
        return plan_of(self.choice, self._model, self._precision)

    def to_json(self) -> dict[str, Any]:
        """The choice and its figures as plain data."""
        return {
            **self.choice.describe(),
            "step_seconds": self.figures.step_seconds,
            "terms": dict(self.figures.terms),
            "peak_bytes": self.figures.peak_bytes,
            "needed_bytes": self.figures.needed_bytes,
            "exact": self.figures.is_exact,
        }


@dataclass(frozen=True)
class Search:
    """What :func:`vescale.search` returns.

    Attributes:
        devices: the number of devices.
        device: their kind, as a table of memory and speeds.
        rows: the number of rows of the global batch.
        tokens: the number of tokens of the global batch.
        proposals: the plans that fit, the fastest first.
        rejected: everything else that was looked at, with the reason.
        seconds: how long the search took.
    """

    devices: int
    device: Device
    rows: int
    tokens: int
    proposals: tuple[Proposal, ...]
    rejected: tuple[Rejected, ...]
    seconds: float

    @property
    def best(self) -> Proposal | None:
        """The fastest proposal; None where nothing fits."""
        return self.proposals[0] if self.proposals else None

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return bool(self.proposals)

    def reasons(self) -> dict[str, int]:
        """The number of rejected choices for each rule, the most frequent rule first."""
        return dict(Counter(one.rule for one in self.rejected).most_common())

    def advice(self) -> list[str]:
        """If nothing fits, sentences that say how much memory is missing and what would help; otherwise an empty list."""
        if self.proposals:
            return []
        missing = [one for one in self.rejected if one.needed_bytes is not None]
        if not missing:
            rules = ", ".join(f"{count} for {rule}" for rule, count in self.reasons().items())
            return [
                f"no mesh of {self.devices} devices takes this model and batch (rejected: {rules}); "
                "give a number of devices that divides the rows of the batch, or a batch that more numbers divide"
            ]
        least = min(missing, key=lambda one: one.needed_bytes or 0)
        needed, memory = least.needed_bytes or 0, self.device.memory_bytes or 0
        found = [
            f"nothing fits: the smallest choice needs {needed / 2**30:.2f} GiB on a device, "
            f"{(needed - memory) / 2**30:.2f} GiB more than {self.device.name} has: {_text(least.what)}"
        ]
        helps = ["more devices", "devices with more memory"]
        if self.rows > 1:
            helps.append("fewer rows in the batch, or shorter ones")
        helps += ["an optimizer with smaller states (adamw8bit)", "parameters in bfloat16"]
        return [*found, f"what would help: {', '.join(helps)}"]

    def to_json(self) -> dict[str, Any]:
        """The whole result as plain data, as ``vescale search --json`` prints it."""
        return {
            "devices": self.devices,
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "rows": self.rows,
            "seconds": self.seconds,
            "fits": self.fits,
            "proposals": [
                {
                    **one.to_json(),
                    "tokens_per_second": self.tokens / one.figures.step_seconds if one.figures.step_seconds else 0.0,
                }
                for one in self.proposals
            ],
            "rejected": [
                {**one.what, "rule": one.rule, "reason": one.reason, "needed_bytes": one.needed_bytes}
                for one in self.rejected
            ],
            "advice": self.advice(),
        }


def _text(what: dict[str, Any]) -> str:
    mesh = ",".join(f"{axis}={size}" for axis, size in what["mesh"].items())
    return f"{mesh}, ZeRO-{what['zero']}, checkpointing {what['checkpoint']}"
