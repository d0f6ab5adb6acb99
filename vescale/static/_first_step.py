"""The first static step of a record that was read: the Python functions that run are compared with the recorded ones."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from vescale.compat import containers, note
from vescale.errors import StaticRecordError
from vescale.static import _hidden_tensors
from vescale.static._call_tree import is_recorded, makes_context_of_another
from vescale.static._fingerprint import code_digest, globals_digest
from vescale.static._record_values import RecordedFunction

__all__ = ["only_recorded_functions"]

_FORWARD = os.path.join(os.path.dirname(__file__), "_forward.py")  # where the forward began
_LOOKS_UP_TENSORS = (containers.__file__, _hidden_tensors.__file__)


def _is_of_the_runtime(frame: FrameType | None, fitting: Collection[int]) -> bool:
    """Whether a function runs because a module is being loaded, which happens once in a process, or because tensors are
    looked up in the model's containers. ``fitting``: ids of the code of the model's functions, which call neither."""
    inside_model = False
    while frame is not None and (file := frame.f_code.co_filename) != _FORWARD:
        if file.startswith("<frozen importlib") or (not inside_model and file in _LOOKS_UP_TENSORS):
            return True
        inside_model |= id(frame.f_code) in fitting
        frame = frame.f_back
    return False


@contextmanager
def only_recorded_functions(
    functions: Iterable[RecordedFunction], originals: Mapping[CodeType, CodeType]
) -> Iterator[None]:
    """Inside, a function of the model's that is none of ``functions``, or finds other things in its globals, raises
    StaticRecordError in place of running.

    Args:
        originals: the code of functions that were changed, by that which runs.
    """
    known = {(function.code, function.found) for function in functions}
    fitting: set[int] = set()  # ids of code that runs, and is kept alive by its function
    problems: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if id(code) in fitting or not is_recorded(code.co_filename) or makes_context_of_another(frame):
            return
        original = originals.get(code, code)
        if (code_digest(original), globals_digest(original, frame.f_globals)) in known:
            fitting.add(id(code))
            return
        if _is_of_the_runtime(frame.f_back, fitting):
            return
        problems.append(f"{original.co_qualname} ({original.co_filename}:{original.co_firstlineno}) was not recorded")
        raise StaticRecordError(problems[0])

    before, collects = sys.gettrace(), gc.isenabled()
    note("static._first_step:process", "sys.settrace", "gc")
    gc.disable()  # callbacks of the garbage collector are no functions of the model
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
        if problems:  # also where the model has caught it
            raise StaticRecordError(problems[0])
