"""The two lanes of `make test`, and the list of what is left to the nightly run."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import examples
from tests.conftest import COLLECTED
from tests.lanes import closing_line, exit_code
from tests.nightly import NIGHTLY, is_nightly

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("codes", "merged"),
    [
        ([0, 0], 0),
        ([0, 5], 0),  # no test of one lane was asked for
        ([5, 0], 0),
        ([5, 5], 5),
        ([1, 0], 1),
        ([0, 1], 1),
        ([1, 5], 1),
        ([1, 2], 2),
        ([4, 1], 4),
        ([0, -9], 9),  # killed
    ],
)
def test_exit_codes(codes: list[int], merged: int) -> None:
    assert exit_code(codes) == merged


def test_closing_line_is_that_of_pytest() -> None:
    assert closing_line({"passed": 3, "warnings": 1}, 2.0) == "3 passed, 1 warning in 2.00s"
    counts = {"error": 2, "passed": 30, "failed": 1, "deselected": 4, "skipped": 5, "warnings": 2}
    line = "1 failed, 30 passed, 5 skipped, 4 deselected, 2 warnings, 2 errors in 3725.10s (1:02:05)"
    assert closing_line(counts, 3725.1) == line
    assert closing_line({}, 0.5) == "no tests ran in 0.50s"


def test_the_nightly_list_is_current(pytestconfig: pytest.Config) -> None:
    for family in NIGHTLY:
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if fnmatchcase(path.name, family.file)]
        assert any(f"def {family.test}(" in path.read_text() for path in files), f"no test is called as {family}"
    if pytestconfig.args != pytestconfig.getini("testpaths"):
        return  # not all tests were collected
    names = [
        re.fullmatch(r"(?:.*/)?([^/]*\.py)::(?:\w+::)?(\w+)(?:\[(.*)\])?", name, re.DOTALL)
        for name in pytestconfig.stash[COLLECTED]
    ]
    found = [name.groups() for name in names if name is not None]
    for family in NIGHTLY:
        own = [case for file, test, case in found if test == family.test and fnmatchcase(file, family.file)]
        unknown = {*family.cases, *family.all_but} - set(own)
        assert not unknown, f"unknown cases {sorted(unknown)} of {family.test}"
    daily = {test for file, test, case in found if not is_nightly(file, test, case)}
    assert {family.test for family in NIGHTLY if family.cases or family.all_but} <= daily


def test_daily_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases at night; daily the same third each time, of every name at least one."""
    cases = [(name, number) for name in ("a", "b", "c") for number in range(7)] + [("d", 0)]
    monkeypatch.setattr(examples, "NIGHTLY", True)
    assert examples.daily_sample(cases) == cases
    monkeypatch.setattr(examples, "NIGHTLY", False)
    found = examples.daily_sample(iter(cases))
    assert found == examples.daily_sample(cases) == sorted(set(found)) and set(found) < set(cases)
    assert [sum(case[0] == name for case in found) for name in "abcd"] == [2, 2, 2, 1]
    assert len(examples.daily_sample(range(10), 2)) == 5
