"""``vescale simulate``: its arguments, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vescale.simulation
from vescale.cli import main
from vescale.simulation import Collective, Finding, RankRecord, Simulation


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Simulations are not run: one rank with a collective, and a finding if the script's argument asks for one."""
    found: list[dict[str, Any]] = []

    def simulate(script: str, args: list[str], **given: Any) -> Simulation:
        found.append({"script": script, "args": args, **given})
        if script == "missing.py":
            raise ValueError("there is no script missing.py")
        record = RankRecord(0, [Collective("all_reduce", "0", [0, 1], "dp", 4, "train.py:3")], [0, ~0], 2048)
        findings = [Finding("deadlock", [0, 1], "train.py:3", "rank 0 waits")] * ("hang" in args)
        return Simulation(given["world_size"], {0: record}, findings, {0: "printed\n"})

    monkeypatch.setattr(vescale.simulation, "simulate", simulate)
    return found


def test_arguments(calls: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["simulate", "--world", "1024", "--rank", "0,5-7", "--logs", str(tmp_path), "train.py", "--mesh", "dp=2"]
    )
    assert code == 0
    assert calls == [
        {
            "script": "train.py",
            "args": ["--mesh", "dp=2"],
            "world_size": 1024,
            "ranks": [0, 5, 6, 7],
            "ranks_per_node": 8,
            "timeout": 300.0,
        }
    ]
    assert "no findings" in capsys.readouterr().out
    assert (tmp_path / "rank_0.log").read_text() == "printed\n"


@pytest.mark.parametrize(("world", "ranks"), [("4", [0, 1, 2, 3]), ("64", [0, 1, 63])])
def test_default_ranks(calls: list[dict[str, Any]], world: str, ranks: list[int]) -> None:
    assert main(["simulate", "--world", world, "train.py"]) == 0
    assert calls[0]["ranks"] == ranks


def test_findings_are_exit_code_1(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--world", "2", "--collectives", "train.py", "hang"]) == 1
    out = capsys.readouterr().out
    assert "deadlock: rank 0 waits" in out and "all_reduce of axis 'dp'" in out


def test_json(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--world", "2", "--json", "train.py", "hang"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["findings"] == [{"kind": "deadlock", "ranks": [0, 1], "at": "train.py:3", "text": "rank 0 waits"}]
    assert data["ranks"]["0"]["collectives"] == [
        {"op": "all_reduce", "axis": "dp", "ranks": [0, 1], "bytes": 4, "site": "train.py:3"}
    ]


@pytest.mark.parametrize("wrong", [["--world", "0", "a.py"], ["--world", "2", "--rank", "x", "a.py"]])
def test_usage(calls: list[dict[str, Any]], wrong: list[str]) -> None:
    assert main(["simulate", *wrong]) == 2
    assert not calls


def test_no_script(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--world", "2", "missing.py"]) == 2
    assert "there is no script missing.py" in capsys.readouterr().err
