"""The order of test files: those that mostly wait are spread over the run, and other processes use the cores meanwhile."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

__all__ = ["spread_waiting_files"]


def spread_waiting_files(items: list[pytest.Item]) -> None:
    """Reorder ``items`` in place: files with a test marked ``waits`` are put at equal distances between the other files.

    Tests of one file stay together and keep their order. The order depends on the tests alone, so that all processes of
    pytest-xdist find the same one.
    """
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    waiting = [file for file, tests in files.items() if any(test.get_closest_marker("waits") for test in tests)]
    order = [file for file in files if file not in set(waiting)]
    distance = len(files) / (len(waiting) + 1)
    for number, file in enumerate(waiting, start=1):
        order.insert(round(number * distance), file)
    items[:] = [test for file in order for test in files[file]]
