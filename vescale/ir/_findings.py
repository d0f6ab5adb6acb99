"""Errors and warnings about a plan for a model: collected, merged over repeated layers, then raised or printed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from vescale.plans import PlanError, Source

# Merged names of repeated layers: ``layers.0.fc`` and ``layers.1.fc`` become ``layers.0-1.fc``.

T = TypeVar("T", bound=Hashable)

# A dotted name with its numeric parts taken out, and those parts as sorted tuples of numbers.
_Row = tuple[tuple[str | None, ...], tuple[tuple[int, ...], ...]]


def merge_repeats(items: Iterable[tuple[str, T]]) -> list[tuple[str, T, int]]:
    """Merge ``(dotted name, rest)`` pairs whose names differ in numeric parts only and whose rests are equal.

    Returns ``(merged name, rest, how many)`` in the order of first appearance.
    """
    rows: dict[tuple[_Row, T], int] = {}
    for name, rest in items:
        key = (_split(name), rest)
        rows[key] = rows.get(key, 0) + 1
    columns = max((len(numbers) for ((_, numbers), _) in rows), default=0)
    for column in reversed(range(columns)):
        merged: dict[tuple[_Row, T], tuple[set[int], int]] = {}
        for ((parts, numbers), rest), count in rows.items():
            own = numbers[column] if column < len(numbers) else ()
            others = (*numbers[:column], (), *numbers[column + 1 :]) if own else numbers
            found, total = merged.get(((parts, others), rest), (set(), 0))
            merged[(parts, others), rest] = (found | set(own), total + count)
        rows = {}
        for ((parts, numbers), rest), (own_set, count) in merged.items():
            if own_set:
                numbers = (*numbers[:column], tuple(sorted(own_set)), *numbers[column + 1 :])
            rows[(parts, numbers), rest] = count
    return [(_join(row), rest, count) for (row, rest), count in rows.items()]


def name_list(names: Iterable[str], limit: int = 4) -> str:
    """Names for a message: repeated layers merged, at most ``limit`` of them, the model itself as ``the model``."""
    merged = [name or "the model" for name, _, _ in merge_repeats((name, None) for name in dict.fromkeys(names))]
    more = len(merged) - limit
    return ", ".join(merged[:limit]) + (f" and {more} more" if more > 0 else "")


def _split(name: str) -> _Row:
    parts = name.split(".")
    numeric = [part.isdecimal() for part in parts]
    return (
        tuple(None if is_number else part for part, is_number in zip(parts, numeric)),
        tuple((int(part),) for part, is_number in zip(parts, numeric) if is_number),
    )


def _join(row: _Row) -> str:
    parts, numbers = row
    remaining = iter(numbers)
    return ".".join(part if part is not None else _ranges(next(remaining)) for part in parts)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3,7`` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


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


class LoweringError(PlanError, code="VS0200"):
    """A plan that does not fit a model; ``findings`` holds every mistake, ``problem`` and ``source`` are the first's."""

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


# Runs of equal modules in lists: the layers of a model.


@dataclass(frozen=True)
class Repeats:
    """Equal modules of a list that follow each other.

    Attributes:
        path: of the list.
        names: of the modules in it. The first stands for all but the last one.
    """

    path: str
    names: tuple[str, ...]

    @property
    def stand_in(self) -> str:
        return f"{self.path}.{self.names[0]}".lstrip(".")

    @property
    def count(self) -> int:
        """How many modules the first stands for."""
        return len(self.names) - 1

    def holds(self, module: str | None) -> bool:
        """Whether a module is the first one, or inside of it."""
        return module is not None and (module == self.stand_in or module.startswith(f"{self.stand_in}."))

    def paths(self) -> Iterator[str]:
        """Of the modules that the first stands for."""
        return (f"{self.path}.{name}".lstrip(".") for name in self.names[:-1])


def repeats_of(model: nn.Module, least: int = 4, apart: Collection[str] = ()) -> tuple[Repeats, ...]:
    """Runs of at least ``least`` equal modules in lists, those of a list in a list with the outer one alone.

    ``apart``: paths of modules with which a new run begins, as stages of a pipeline do.
    """

    def visit(module: nn.Module, path: str) -> Iterator[Repeats]:
        runs = list(_runs(module, path, least, apart)) if isinstance(module, nn.ModuleList) else []
        yield from runs
        repeated = {name for run in runs for name in run.names}
        for name, child in module.named_children():
            if name not in repeated:
                yield from visit(child, f"{path}.{name}" if path else name)

    return tuple(visit(model, ""))


def _runs(modules: nn.ModuleList, path: str, least: int, apart: Collection[str]) -> Iterator[Repeats]:
    run: list[str] = []
    kind: Any = None
    for name, child in modules.named_children():
        own = _kind(child)
        if own != kind or f"{path}.{name}".lstrip(".") in apart:
            if len(run) >= least:
                yield Repeats(path, tuple(run))
            run, kind = [], own
        run.append(name)
    if len(run) >= least:
        yield Repeats(path, tuple(run))


def _kind(module: nn.Module) -> Any:
    """Equal for modules whose forwards use the same memory."""
    return (
        tuple((name, type(part)) for name, part in module.named_modules()),
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters(remove_duplicate=False)),
    )
