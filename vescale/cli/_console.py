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
from rich.padding import Padding
from rich.table import Table

_UNWRAPPED = 100_000  # columns: a pipe gets lines whole
_NARROW = 16  # columns: text in less of them is not readable
_PATIENCE = 1.0  # seconds


def new_console() -> Console:
    """Standard output; names such as ``<in>`` and ``[0]`` are printed as they are. Lines are wrapped to the terminal, or to
    ``COLUMNS``; a pipe gets them whole."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = shutil.get_terminal_size().columns if known else _UNWRAPPED
    return _Output(width=width, markup=False, highlight=False, emoji=False)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process with exit code 1

    def print(self, *objects: Any, **options: Any) -> None:
        """Columns of a table are two spaces apart, or one where it would not fit; if it still does not, each row is a
        paragraph."""
        if not isinstance(table := objects[0] if objects else None, Table) or self._fits(table):
            return super().print(*objects, **options)
        names = [str(column.header).strip() for column in table.columns]
        for first, *others in zip(*(column.cells for column in table.columns)):
            super().print(f"{names[0]} {first}".strip(), style="bold")
            text = "; ".join(f"{name} {cell}".strip() for name, cell in zip(names[1:], others) if cell)
            super().print(Padding(text, (0, 0, 0, 2)))

    def _fits(self, table: Table) -> bool:
        """Numbers and short texts whole, and longer texts readable."""
        widths = [max((len(str(cell)) for cell in (c.header, *c.cells)), default=0) for c in table.columns]
        least = [width if c.no_wrap else min(width, _NARROW) for width, c in zip(widths, table.columns)]
        for apart in (2, 1):
            if sum(least) + apart * (len(least) - 1) <= self.width:
                table.padding = (0, apart, 0, 0)
                return True
        return False


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines between rows; the columns named in ``right`` hold numbers, which are not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_number = column in right
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
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
