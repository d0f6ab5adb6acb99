"""Where an entry of a plan was written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Source", "calling_line"]

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Source:
    """Where an entry was written: a line of Python, or a line and column of YAML (counted from 1)."""

    file: str
    line: int
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.column}" if self.column is not None else "")


def calling_line() -> Source:
    """The nearest line outside this library on the call stack: the user's ``plan.shard(...)``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)
