"""Output for people and programs: tables and colours on a terminal, the same lines without colours in a pipe, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

_UNWRAPPED = 100_000  # columns: names are never cut, and only a terminal itself wraps lines

_PATIENCE = 1.0  # seconds


def new_console(*, fits: bool = False) -> Console:
    """Standard output; names such as ``<in>`` and ``[0]`` are printed as they are. ``fits``: lines are wrapped to the
    terminal, or to ``COLUMNS``; a pipe gets them whole."""
    known = fits and (sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal())
    width = shutil.get_terminal_size().columns if known else _UNWRAPPED
    return _Output(width=width, markup=False, highlight=False, emoji=False)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process with exit code 1


def new_table(*columns: str, right: tuple[str, ...] = (), wrapped: tuple[str, ...] = ()) -> Table:
    """A table without lines between rows; the columns named in ``right`` hold numbers, those in ``wrapped`` sentences."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column not in wrapped)
    return table


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Inside, a spinner with ``text`` turns on a terminal's standard error, from the first second on. Print afterwards: what
    a model prints there is no result, and goes to standard error."""
    if not sys.stderr.isatty():
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    status = Console(stderr=True).status(text)
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2)
    print()


def bytes_text(num_bytes: int) -> str:
    """``96 B``, ``1.5 KiB``, ``3.0 GiB``."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
