"""Functions whose code is exchanged while static forwards run, which all threads see."""

from __future__ import annotations

import threading
import types
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vescale.compat import note


@dataclass(frozen=True)
class ExchangedFunction:
    """``code`` stands in place of ``original``, the function's own, while somebody uses it."""

    function: types.FunctionType
    original: types.CodeType
    code: types.CodeType

    def __post_init__(self) -> None:
        note("static._exchanged_code:code", self.function)

    def use(self) -> bool:
        """False, with nothing changed, while another thread has other code there."""
        with _lock:
            current, users = _in_use.get(id(self.function), (self, 0))
            if current.code is not self.code:
                return False
            _in_use[id(self.function)] = self, users + 1
            _uses[id(self.code)] += 1
            self.function.__code__ = self.code
            return True

    def release(self) -> None:
        with _lock:
            _, users = _in_use.pop(id(self.function))
            if users > 1:
                _in_use[id(self.function)] = self, users - 1
            else:
                self.function.__code__ = self.original
            _uses[id(self.code)] -= 1
            if not _uses[id(self.code)]:
                del _uses[id(self.code)]


_lock = threading.Lock()
_in_use: dict[int, tuple[ExchangedFunction, int]] = {}  # by id of the function, with the number of uses
_uses: Counter[int] = Counter()  # by id of the code


def code_of(function: Any) -> types.CodeType | None:
    """The function's own code; None for what is no function in Python."""
    with _lock:
        found = _in_use.get(id(function))
        return getattr(function, "__code__", None) if found is None else found[0].original


def is_exchanged(code: types.CodeType) -> bool:
    """Whether this is no function's own code."""
    return id(code) in _uses
