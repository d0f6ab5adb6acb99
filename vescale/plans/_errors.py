"""Errors of plans, with the place to edit."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MissingMeshError", "PlanError", "PlanMismatchError", "Source", "calling_line", "did_you_mean"]

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Source:
    """Where an entry was written: a line of Python, or a line and column of YAML (counted from 1)."""

    file: str
    line: int
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.column}" if self.column is not None else "")


class PlanError(ValueError):
    """An invalid plan: what was found, what was expected, and the edit that fixes it, with its source.

    ``source`` is the position of the mistake, if known; ``problem`` is the message without it.
    """

    def __init__(self, problem: str, source: Source | None = None) -> None:
        super().__init__(f"{source}: {problem}" if source is not None else problem)
        self.problem = problem
        self.source = source


class MissingMeshError(PlanError):
    """A plan file without sizes of its axes was read without a mesh."""


class PlanMismatchError(PlanError):
    """Ranks are about to run different things; the same error on every rank, before any collective.

    ``ranks``: the global ranks that differ from the majority, or have not come.
    """

    def __init__(self, problem: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


def calling_line() -> Source:
    """The nearest line outside this library on the call stack: the user's ``plan.shard(...)``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a near miss, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
