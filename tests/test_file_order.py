"""The order of test files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.file_order import spread_waiting_files


def items(*files: tuple[str, bool]) -> list[Any]:
    """Two tests of each file, of which the second one has the mark."""
    return [
        SimpleNamespace(path=Path(file), name=f"{file}{number}", get_closest_marker=lambda _, m=waits and number: m)
        for file, waits in files
        for number in range(2)
    ]


def test_waiting_files_are_spread() -> None:
    tests = items(("a", True), ("b", True), ("c", False), ("d", False), ("e", False), ("f", False))
    found = list(tests)
    spread_waiting_files(found)
    assert "".join(test.name for test in found) == "c0c1d0d1a0a1e0e1b0b1f0f1"


def test_without_waiting_files_the_order_stays() -> None:
    tests = items(("a", False), ("b", False))
    found = list(tests)
    spread_waiting_files(found)
    assert found == tests
    one = items(("a", True))
    spread_waiting_files(one)
    assert [test.name for test in one] == ["a0", "a1"]
