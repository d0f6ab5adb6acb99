"""``vescale new``: a project that runs at once, alone and on ranks, and goes on on another mesh."""

from __future__ import annotations

import json
import os
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.example_scripts.loading import load
from tests.fork_server import fork_context
from tests.ranks import RankPools
from vescale.cli import main


def trained(folder: str, *changes: str) -> list[float]:
    sys.path.insert(0, folder)
    try:
        return load("train", Path(folder)).main([*changes])
    finally:
        sys.path.remove(folder)
        sys.modules.pop("model", None)


def run_alone(folder: Path, arguments: list[str]) -> None:
    """As ``python train.py`` does in the project's folder."""
    os.chdir(folder)
    sys.argv[:] = ["train.py", *arguments]
    sys.path.insert(0, str(folder))
    runpy.run_path("train.py", run_name="__main__")


def test_a_project_trains_on_any_mesh(ranks: RankPools, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    assert main(["new", str(folder)]) == 0
    small = ["model={vocabulary: 256, hidden: 32, layers: 1, heads: 4, length: 16, dropout: 0.1}", "batch=4", "steps=4"]
    with ProcessPoolExecutor(1, fork_context()) as pool:  # sizes are those of one process
        pool.submit(run_alone, folder, [*small, "out=alone", "mesh=dp=2,tp=2"]).result()
    expected = [json.loads(line)["loss"] for line in (folder / "alone" / "steps.jsonl").read_text().splitlines()]
    assert len(expected) == 4
    two = [*small, "save_every=2", "mesh=dp=2,tp=1"]
    first = ranks.run(trained, str(folder), *two, "steps=2", world_size=2)
    rest = ranks.run(trained, str(folder), *two, "mesh=dp=1,tp=2", world_size=2)
    for found in (a + b for a, b in zip(first, rest, strict=True)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_commands_of_its_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "project"
    main(["new", str(folder)])
    monkeypatch.chdir(folder)
    lines = (folder / "README.md").read_text().splitlines()
    commands = [line.split()[1:] for line in lines if line.startswith("vescale ")]
    assert [command[0] for command in commands] == ["lint", "explain", "plan"]
    for command in commands:
        assert main(command) == 0
    assert "no findings" in capsys.readouterr().out
    new = (folder / "new.yaml").read_text()
    for name in ("tokens", "labels"):
        assert f"<in:{name}>: {{dp: S(0)}}" in new  # where the page says what to add
    assert main(["lint", "new.yaml", *commands[0][2:]]) == 0
    sys.modules.pop("model", None)


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["new", str(tmp_path)]) == 2
    assert "nothing was written" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert main(["new", str(tmp_path / "mine")]) == 2
