"""The mutation harness (tools/mutate.py): what ends a run, and how a later run continues."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("mutate")


@pytest.fixture
def copies(tool: types.ModuleType, tmp_path: Path) -> object:
    """Of a project whose tests run for ever, sleep, or fail whatever is planted."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "code.py").write_text("def answer():\n    return 42\n")
    (root / "test_code.py").write_text(
        "import time\nfrom code_here import answer\n\n"
        "def test_runs_on():\n    while answer(): pass\n\n"
        "def test_waits():\n    time.sleep(1000)\n\n"
        "def test_broken():\n    assert False\n\n"
        "def test_sound():\n    assert answer() == 42\n"
    )
    (root / "code.py").rename(root / "code_here.py")
    (root / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return sys.modules["mutant_runs"].Copies(root, tmp_path / "copies")


def test_a_run_is_limited_by_its_cpu_time(copies) -> None:
    code, _ = copies.run_tests(["test_code.py::test_runs_on"], 1.0)
    assert code is None


def test_a_run_that_only_waits_is_ended(copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mutant_runs"], "IDLE_LIMIT", 3.0)
    code, _ = copies.run_tests(["test_code.py::test_waits"], 1000.0)
    assert code is None


def test_only_failures_of_the_mutant_count(tool: types.ModuleType, copies) -> None:
    text = (copies.here() / "code_here.py").read_text()
    first = text.index("42")
    mutant = tool.Mutant("code_here.py", 2, first, first + 2, "constant", "42", "43")
    unchanged = replace(mutant, after="42")
    tests = ["test_code.py::test_broken", "test_code.py::test_sound"]
    killed = tool.try_mutant(mutant, tests, 60.0, copies, None)
    assert (killed.status, killed.by) == ("killed", "test_code.py::test_sound")
    assert copies.broken == ["test_code.py::test_broken"]
    assert tool.try_mutant(unchanged, tests, 60.0, copies, None).status == "survived"
    assert (copies.here() / "code_here.py").read_text() == text


def test_a_later_run_continues(tool: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("1 + 1")
    mutants = [tool.Mutant("a.py", 1, 0, 5, "arithmetic", "1 + 1", after) for after in ("1 - 1", "1 * 1")]
    outcomes = [
        tool.Outcome(mutants[0], "killed", "test_a", 1.0, ("test_a",)),
        tool.Outcome(mutants[1], "survived", "", 2.0, ("test_a", "test_b")),
    ]
    file = tmp_path / "out" / "mutants.json"
    tool.save(file, 0, 3, 60.0, outcomes)
    assert tool.kept_outcomes(file, mutants) == dict(zip(mutants, outcomes))
    met = tool.try_mutant(mutants[1], ["test_b"], 1.0, None, outcomes[1])
    assert met is outcomes[1], "tests that a survivor has met are not run again"
    (tmp_path / "a.py").write_text("1 + 1 ")
    assert tool.kept_outcomes(file, mutants) == {}, "another file, other mutants"
