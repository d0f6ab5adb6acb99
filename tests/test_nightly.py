"""The list of what is left to the nightly run, and the times of tests that are kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import examples
from tests.conftest import COLLECTED
from tests.nightly import NIGHTLY, is_nightly

ROOT = Path(__file__).parent.parent


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


_CONFTEST = """
from tests.durations import Durations

def pytest_configure(config):
    config.pluginmanager.register(Durations(config))
"""
_TESTS = """
import time, pytest

@pytest.mark.parametrize("number", range(11))
def test_{name}(number):
    if number == 3:
        time.sleep(0.2)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadfile"]], ids=["alone", "workers"])
def test_durations_are_kept(tmp_path: Path, workers: list[str]) -> None:
    """Wall and CPU time of each test, with and without workers, beside those of tests that did not run."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(_TESTS.format(name=name))
    kept = tmp_path / ".pytest_cache" / "v" / "vescale" / "durations"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"test_old.py::test_old": {"seconds": 1.0, "cpu": 1.0}}')
    command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(tmp_path), *workers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    times = json.loads(kept.read_text())
    names = {f"test_{name}.py::test_{name}[{number}]" for name in ("a", "b") for number in range(11)}
    assert set(times) == {"test_old.py::test_old"} | names
    assert all(time["seconds"] >= 0.2 > time["cpu"] for name, time in times.items() if name.endswith("[3]"))
    slowest = [line for line in done.stdout.partition("slowest 10 tests")[2].splitlines() if line]
    assert {line.split()[-1] for line in slowest[1:3]} == {"test_a.py::test_a[3]", "test_b.py::test_b[3]"}
    assert slowest[11].startswith("22 tests, ")
