"""``Console`` and ``Table`` of rich. Importing them draws a number from Python's generator, which is put back: a program
draws what it would draw on one device."""

import random

__all__ = ["Console", "Table"]

_before = random.getstate()
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

random.setstate(_before)
