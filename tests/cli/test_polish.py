"""Commands at a terminal's edges: pipes that close, narrow screens, imports, and help."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vescale import Plan
from vescale.cli import _main, main
from vescale.cli._console import working

COMMANDS = ("", *_main.COMMANDS, "plan new", "zoo import")

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())
"""


def vescale(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vescale", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_the_zoo_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["zoo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.startswith("llama ") for line in lines)
    monkeypatch.delenv("COLUMNS")
    assert main(["zoo"]) == 0  # a pipe gets one line for each plan
    assert len(capsys.readouterr().out.splitlines()) < len(lines)


def test_commands_that_do_not_load_torch() -> None:
    """The zoo, and the help of every command (one process: whichever loads torch is the last one that is named)."""
    commands = [
        ["--help"],
        ["--version"],
        ["zoo"],
        ["zoo", "show", "llama"],
        ["attach", "no socket"],
        *([name, "--help"] for name in COMMANDS if name),
    ]
    code = "import sys\nfrom vescale.cli import main\n"
    code += f"for command in {[[word for text in c for word in text.split()] for c in commands]}:\n"
    code += " try:\n  main(command)\n except SystemExit: pass\n assert 'torch' not in sys.modules, command\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m vescale zoo; echo code $? >&2"
    process = subprocess.Popen(["bash", "-c", f"({command}) | true"], stderr=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[1] == "code 0\n"


def test_the_exit_code_and_all_output_arrive() -> None:
    done = vescale("zoo", "show", "nothing")
    assert done.returncode == 2 and "the plan zoo has no plan 'nothing'" in done.stderr
    done = vescale("zoo")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("whisper")


def test_a_spinner_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("vescale.cli._console._PATIENCE", 0.1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with working("at work"):
        pass
    assert screen.getvalue() == ""
    with working("at work"):
        time.sleep(0.5)
    assert "at work" in screen.getvalue()


def test_a_new_plan_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_net.py").write_text(MODEL)
    model, plan = f"{tmp_path}/my_net.py:Net", str(tmp_path / "plan.yaml")
    assert main(["plan", "new", model, "--mesh", "dp=2,tp=2", "--zero", "3", "-o", plan]) == 0
    assert main(["lint", plan, "--model", model, "--input", "x=4x8"]) == 0
    assert "no findings" in capsys.readouterr().out
    assert "up.(weight|bias): {tp: S(0)}" in Path(plan).read_text()
    assert main(["plan", "new", model, "--mesh", "pp=2"]) == 2
    assert "axis 'pp' of the mesh (pp=2) is unused" in capsys.readouterr().err
    assert main(["plan", "new", f"{tmp_path}/other.py:Net", "--mesh", "tp=2"]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_what_a_model_prints_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MODEL.replace(
        "def forward(", "def forward(self, x):\n        print('at work')\n        return self.run(x)\n\n    def run("
    )
    (tmp_path / "loud.py").write_text("print('imported')\n" + text)
    assert main(["plan", "new", f"{tmp_path}/loud.py:Net", "--mesh", "dp=2,tp=2", "--input", "x=4x8"]) == 0
    found = capsys.readouterr()
    assert Plan.from_yaml(found.out).entries and "imported" in found.err and "at work" in found.err
    (tmp_path / "table.py").write_text("from torch import nn\nNet = lambda: nn.Sequential(nn.Embedding(9, 4))\n")
    assert main(["plan", "new", f"{tmp_path}/table.py:Net", "--mesh", "tp=2", "--input", "input=8x32"]) == 2
    assert "--input NAME=SHAPE:int64" in capsys.readouterr().err


def test_the_axis_that_a_plan_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a_net.py").write_text(MODEL)
    assert main(["lint", "llama", "--model", f"{tmp_path}/a_net.py:Net", "--mesh", "tp=2"]) == 1
    assert "add the missing axis with one rank, as in dp=1,tp=2" in capsys.readouterr().out
    assert main(["lint", "llama", "--model", f"{tmp_path}/a_net.py:Net", "--mesh", "ddp=2,tp=2"]) == 1
    assert "rename the axis in one of the two; did you mean 'ddp'?" in capsys.readouterr().out
