"""The line of the user's program that is running."""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType
from typing import Any

import torch

__all__ = ["call_site"]

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)) if path)


@functools.lru_cache(maxsize=4096)
def _is_of_a_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARIES) or code.co_filename.startswith("<")


def call_site() -> str:
    """``train.py:37 (main)``: the innermost line outside of PyTorch and vescale; "" if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_of_a_library(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"
