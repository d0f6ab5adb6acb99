"""Output for people and programs: tables and colours on a terminal, the same lines without colours in a pipe, JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["bytes_text", "new_console", "new_table", "print_json"]

_UNWRAPPED = 100_000  # columns: names are never cut, and only a terminal itself wraps lines


def new_console() -> Console:
    """Standard output; names such as ``<in>`` and ``[0]`` are printed as they are."""
    return Console(width=_UNWRAPPED, markup=False, highlight=False, emoji=False)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines between rows; the columns named in ``right`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


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
