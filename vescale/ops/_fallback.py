"""Reports of ops that have no rule for a placement and gather their operand: one warning a line of code, or an error."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist

from vescale.errors import Coded

__all__ = [
    "PlacementFallbackError",
    "PlacementFallbackWarning",
    "report_fallback",
    "strict_placements",
]


class PlacementFallbackWarning(Coded, UserWarning):
    """An op had no rule for a placement, so the whole operand was communicated; correct, but not free."""

    code = "VS1602"


class PlacementFallbackError(Coded, RuntimeError):
    """The same, in :func:`strict_placements`."""

    code = "VS1601"


# Ranks in strict mode, one entry for each open context. Backward may run on another thread and ranks may be threads of one
# process, so neither a context variable nor a thread-local would do.
_STRICT: list[int] = []
_REPORTED: set[tuple[str, int, str, str]] = set()
_LOCK = threading.Lock()
_INTERNAL = (torch.__path__[0], __file__.rpartition("ops")[0])


@contextlib.contextmanager
def strict_placements() -> Iterator[None]:
    """Ops without a rule for a vescale placement raise :class:`PlacementFallbackError` instead of gathering operands.

    The error comes before any communication, and on every rank that runs the op.
    """
    rank = _own_rank()
    with _LOCK:
        _STRICT.append(rank)
    try:
        yield
    finally:
        with _LOCK:
            _STRICT.remove(rank)


def report_fallback(op: str, operand: str, target: str, is_lost: bool) -> None:
    """Report that ``op`` brings ``operand`` to ``target``; warns once for each line of user code, op and operand.
    ``is_lost``: whether what is written to the result does not reach the operand."""
    filename, line = _site()
    found = f"{filename}:{line}: {op} has no rule for {operand}"
    fix = "redistribute it yourself where the op is called, or keep the op's operands in a placement it has a rule for"
    if _STRICT and _own_rank() in _STRICT:
        raise PlacementFallbackError(
            f"{found}; it would be brought to {target}, and strict_placements() expects no implicit communication; {fix}"
        )
    key = (filename, line, op, operand)
    with _LOCK:
        if key in _REPORTED:
            return
        _REPORTED.add(key)
    note = "; the result is a copy, not a view: writes to it do not reach the operand" if is_lost else ""
    text = f"{found}; it is brought to {target}, which communicates on every call{note}; {fix}"
    warnings.warn_explicit(text, PlacementFallbackWarning, filename, line)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _site() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this library."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INTERNAL) and not name.startswith("<"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "<backward>", 0
