"""What a type checker says of scripts that use vescale, from outside of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def checked(checker: str, script: str, folder: Path) -> set[int]:
    """Lines with an error, of a script in a folder of its own."""
    file = folder / "script.py"
    file.write_text((ROOT / "tests" / "types" / script).read_text())
    options = {
        "mypy": ["--strict", "--no-error-summary", "--config-file=", "--cache-dir", str(ROOT / ".mypy_cache_types")],
        "pyright": ["--pythonpath", sys.executable],
    }[checker]
    command = [sys.executable, "-m", checker, *options, str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if checker == "mypy":
        environment["MYPYPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode < 2, done.stderr + done.stdout
    return {int(line) for line in re.findall(r"script\.py:(\d+)(?::\d+)?(?: -|:) error", done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_mistyped_calls_are_found(checker: str, tmp_path: Path) -> None:
    text = (ROOT / "tests" / "types" / "wrong.py").read_text()
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "  # " in line}
    assert len(wrong) >= 30
    assert checked(checker, "wrong.py", tmp_path) == wrong, "not found, or found elsewhere"


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_right_script_has_no_findings(checker: str, tmp_path: Path) -> None:
    assert checked(checker, "right.py", tmp_path) == set()
