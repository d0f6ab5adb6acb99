"""Which tests `make test` leaves to `make test-all`: those of ``tests/nightly.yaml``, beside those marked ``slow``.

A test is there because another test, which stays in the daily run, covers the same mechanism. An entry that matches
nothing fails ``tests/test_nightly.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

__all__ = ["NIGHTLY", "Family", "is_nightly"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cases of one test function.

    Attributes:
        file: pattern of the file's name.
        test: name of the function.
        daily: what covers the mechanism in the daily run.
        cases: what stands in brackets behind the name, one string for each case; empty: all but ``all_but``.
        all_but: cases that run daily; without them and ``cases``, the whole function is nightly.
    """

    file: str
    test: str
    daily: str
    cases: tuple[str, ...] = ()
    all_but: tuple[str, ...] = ()

    def has(self, file: str, test: str, case: str | None) -> bool:
        if test != self.test or not fnmatchcase(file, self.file):
            return False
        return case in self.cases if self.cases else case not in self.all_but


def _read() -> list[Family]:
    files = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    found = []
    for file, tests in files.items():
        for test, values in tests.items():
            lists = {key: tuple(values.pop(key)) for key in ("cases", "all_but") if key in values}
            found.append(Family(file=file, test=test, **values, **lists))
    return found


NIGHTLY = _read()


def is_nightly(file: str, test: str, case: str | None) -> bool:
    """Whether ``test[case]`` of a file of this name is left to the nightly run."""
    return any(family.has(file, test, case) for family in NIGHTLY)
