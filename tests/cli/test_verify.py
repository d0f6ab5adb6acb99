"""``vescale verify``: exit code, text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vescale.cli import main

PLAN = """
mesh: {tp: 2}
shard:
  attention.(q|k|v).weight: {tp: S(0)}
  attention.o.weight: {tp: S(1)}
  attention.o.<out>: {tp: R}
"""


def test_equal_and_different(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    common = ["verify", str(plan), "--input", "ids=2x4:int64", "--steps", "1"]
    assert main([*common, "--model", "tests.debug.test_verify:Net", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "equal" and found["meshes"][0]["mesh"] == {"tp": 2}
    assert main([*common, "--model", "tests.debug.test_verify:averaged_twice", "--mesh", "tp=2"]) == 1
    text = capsys.readouterr().out
    assert "tp=2: DIFFERENT: the first difference is gradient attention.q." in text, text
    assert f"{plan}:4" in text, text


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    arguments = ["verify", str(plan), "--model", "tests.debug.test_verify:Net"]
    assert main([*arguments]) == 2 and "--input x=8x16" in capsys.readouterr().err
    assert main([*arguments, "--mesh", "ep=2", "--input", "ids=2x4:int64"]) == 2
