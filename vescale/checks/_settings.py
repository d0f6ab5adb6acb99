"""What is checked while a script runs: ``VESCALE_CHECK``, ``VESCALE_CHECK_EVERY`` and :func:`unchecked`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vescale.errors import ArgumentError

FIRST = 3
"""So many forwards are compared at first."""
_MODES = ("", "steps", "off")
_THREAD = threading.local()


def check_mode() -> str:
    """``VESCALE_CHECK``: "steps", "off", or "" for the default. Raises ValueError for others."""
    mode = os.environ.get("VESCALE_CHECK", "")
    if mode not in _MODES:
        raise ArgumentError(f"VESCALE_CHECK is {mode!r}; set it to 'steps' or 'off', or unset it")
    return mode


def check_every() -> int:
    """``VESCALE_CHECK_EVERY``, 100 by default: values are compared in every so many forwards after the first three; 0: in
    none. Raises ValueError for what is no such number."""
    text = os.environ.get("VESCALE_CHECK_EVERY", "100")
    if not text.isdecimal():
        raise ArgumentError(f"VESCALE_CHECK_EVERY is {text!r}; set it to a number of forwards (0: never), or unset it")
    return int(text)


@contextmanager
def unchecked() -> Iterator[None]:
    """What this thread passes to models inside is not compared between ranks: for values that differ on purpose, on every
    rank. Steps are compared nevertheless (``VESCALE_CHECK=off`` in the environment compares nothing)."""
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


def is_unchecked() -> bool:
    return bool(getattr(_THREAD, "depth", 0))
