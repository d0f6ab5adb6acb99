"""``Coded``: the stable code of an error or warning, at the end of its message."""

from __future__ import annotations

import re
from typing import Any, ClassVar

__all__ = ["CODES", "Coded"]

CODES: dict[str, type[Coded]] = {}
"""Code -> class, of all classes that have been imported."""

_CODE = re.compile(r"VS\d{4}")
_CODE_AT_END = re.compile(r"\[VS\d{4}\]$")


class Coded:
    """A base of exceptions and warnings whose text ends with ``[code]``.

    Attributes:
        code: ``VS`` and four digits, which no other class has; docs/errors.md has a section for it.

    A message that quotes another error keeps that error's code if it stands at the end: it says more.
    """

    code: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        code = cls.__dict__.get("code")
        if code is None:
            return
        assert _CODE.fullmatch(code), f"{cls.__name__}.code is {code!r}"
        other = CODES.setdefault(code, cls)
        assert other is cls or other.__qualname__ == cls.__qualname__, (
            f"{cls.__name__} and {other.__name__} have {code}"
        )

    def __str__(self) -> str:
        own: Any = self
        # KeyError quotes its argument, as a key.
        text = str(own.args[0]) if isinstance(self, KeyError) and len(own.args) == 1 else super().__str__()
        return text if _CODE_AT_END.search(text) else f"{text} [{self.code}]"
