"""What a type checker says of scripts that use vescale, from outside of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def checked(script: str, folder: Path) -> dict[int, str]:
    """Line -> message."""
    options = ["--strict", "--no-error-summary", "--config-file=", "--cache-dir", str(ROOT / ".mypy_cache_types")]
    file = folder / "script.py"
    file.write_text((ROOT / "tests" / "types" / script).read_text())
    command = [sys.executable, "-m", "mypy", *options, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode < 2, done.stderr + done.stdout
    lines = re.findall(r"script\.py:(\d+): error: (.*)", done.stdout)
    return {int(line): message for line, message in lines}


@pytest.mark.slow
def test_mistyped_calls_are_found(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "types" / "wrong.py").read_text()
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "  # " in line}
    found = checked("wrong.py", tmp_path)
    assert len(wrong) >= 30
    assert set(found) == wrong, "not found, or found elsewhere"


@pytest.mark.slow
def test_a_right_script_has_no_findings(tmp_path: Path) -> None:
    assert checked("right.py", tmp_path) == {}
