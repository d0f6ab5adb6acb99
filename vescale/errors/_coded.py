"""``Coded``: the stable code of an error's or warning's kind, at the end of its message."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vescale.errors._kinds import KINDS

CODES: dict[str, list[type[Coded]]] = {}
"""Code -> the classes of this kind that have been imported."""

_CODE_AT_END = re.compile(r"\[VS\d{4}\]$")


class Coded:
    """A base of exceptions and warnings whose text ends with ``[code]``.

    Attributes:
        code: ``VS`` and four digits, of the kind of the mistake (``KINDS``); docs/errors.md has a section for it.

    A message that quotes another error keeps that error's code if it stands at the end: it says more.
    """

    code: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        code = cls.__dict__.get("code")
        if code is None:
            return
        assert code in KINDS, f"{cls.__name__}.code is {code!r}"
        CODES.setdefault(code, []).append(cls)

    def __str__(self) -> str:
        own: Any = self
        # KeyError quotes its argument, as a key.
        text = str(own.args[0]) if isinstance(self, KeyError) and len(own.args) == 1 else super().__str__()
        return text if _CODE_AT_END.search(text) else f"{text} [{self.code}]"


# The type of a value, as messages name it.


def kind_of(value: Any) -> str:
    """``a Linear``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


# The known name that a wrong one is close to.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a near miss, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Where an entry of a plan was written.

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
