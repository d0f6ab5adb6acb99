"""Errors and warnings about a plan for a model: collected, merged over repeated layers, then raised or printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vescale.ir._merged_names import name_list
from vescale.plans import PlanError, Source

__all__ = ["Finding", "Findings", "LoweringError", "Severity"]

Severity = Literal["error", "warning"]

_MAX_SHOWN = 20  # in the message of an error


@dataclass(frozen=True)
class Finding:
    """One mistake or doubt.

    Attributes:
        severity: an ``error`` stops :func:`lower`; a ``warning`` is for ``vescale lint``.
        rule: a short name that does not change: ``no-match``, ``conflict``, ``head``, ...
        problem: what was found, what was expected, and the edit that fixes it.
        source: the plan's line.
        names: the tensors or modules it is about.
    """

    severity: Severity
    rule: str
    problem: str
    source: Source | None
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}" if self.source is not None else self.problem


class LoweringError(PlanError):
    """A plan that does not fit a model; ``findings`` holds every mistake, ``problem`` and ``source`` are the first's."""

    code = "VS0200"

    def __init__(self, findings: Sequence[Finding]) -> None:
        first = findings[0]
        super().__init__(first.problem, first.source)
        self.findings = tuple(findings)
        if len(findings) > 1:
            lines = "".join(f"\n  {finding}" for finding in findings[:_MAX_SHOWN])
            if len(findings) > _MAX_SHOWN:
                lines += f"\n  and {len(findings) - _MAX_SHOWN} more; vescale lint shows all"
            self.args = (f"{len(findings)} mistakes in the plan:{lines}",)

    def __reduce__(self) -> tuple[type[LoweringError], tuple[tuple[Finding, ...]]]:
        return LoweringError, (self.findings,)  # errors cross processes


class Findings:
    """Collects findings; equal ones of several layers become one."""

    def __init__(self) -> None:
        self._names: dict[tuple[Severity, str, str, Source | None], dict[str, None]] = {}

    def add(self, severity: Severity, rule: str, problem: str, source: Source | None, name: str = "") -> None:
        """``{names}`` in ``problem`` stands for every name that the same problem, rule and line were added with."""
        self._names.setdefault((severity, rule, problem, source), {})[name] = None

    def error(self, rule: str, problem: str, source: Source | None, name: str = "") -> None:
        self.add("error", rule, problem, source, name)

    def warning(self, rule: str, problem: str, source: Source | None, name: str = "") -> None:
        self.add("warning", rule, problem, source, name)

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def has_errors(self) -> bool:
        return any(severity == "error" for severity, *_ in self._names)

    def collect(self) -> tuple[Finding, ...]:
        """Errors first, each kind in the order of the plan's checks."""
        found = [
            Finding(severity, rule, problem.replace("{names}", name_list(names)), source, tuple(names))
            for (severity, rule, problem, source), names in self._names.items()
        ]
        return tuple(sorted(found, key=lambda finding: finding.severity != "error"))
