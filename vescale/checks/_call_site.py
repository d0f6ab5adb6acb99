"""The line of the user's program that is running."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from vescale import csrc
from vescale.comm import Board

__all__ = ["call_site", "called_by_user", "native_steps"]

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)) if path)

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_IS_OF_A_LIBRARY: dict[str, bool] = {}  # by file


def _is_of_a_library(file: str) -> bool:
    found = _IS_OF_A_LIBRARY[file] = file.startswith(_LIBRARIES) or file.startswith("<")
    return found


def called_by_user(depth: int) -> bool:
    """Whether the code so many calls above this function is neither PyTorch's nor vescale's."""
    file = sys._getframe(depth).f_code.co_filename
    known = _IS_OF_A_LIBRARY.get(file)
    return not file.startswith(_PACKAGE) and not (_is_of_a_library(file) if known is None else known)


def call_site() -> str:
    """``train.py:37 (main)``: the innermost line outside of PyTorch and vescale; "" if there is none."""
    native = csrc.step_marks()
    if native is not None:
        return str(native.call_site(_IS_OF_A_LIBRARY, _is_of_a_library))
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _IS_OF_A_LIBRARY.get(code.co_filename)
        if not (_is_of_a_library(code.co_filename) if known is None else known):
            break
        frame = frame.f_back
    else:
        return ""
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"


def native_steps(board: Board | None) -> Any:
    """What posts forwards and backwards to a board in C++, with the line of the program; None: Python does it."""
    native = csrc.step_marks()
    if native is None or board is None or board.row is None:
        return None
    return native.Steps(board.row, _IS_OF_A_LIBRARY, _is_of_a_library)
