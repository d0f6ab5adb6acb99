"""``vescale demo``: its numbers, its verdicts, and how it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from vescale.cli import main
from vescale.cli._demo_chart import loss_chart
from vescale.debug import ProcessFailed, messages

pytestmark = pytest.mark.waits


def in_this_process(*arguments: str) -> None:
    assert main(arguments) == 0


def in_a_new_process(*arguments: str) -> None:
    command = [sys.executable, "-m", "vescale", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.mark.parametrize(
    "run", [in_this_process, pytest.param(in_a_new_process, marks=pytest.mark.slow)], ids=lambda run: run.__name__
)
def test_demo_on_two_ranks(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("demo", "--steps", "3", "--mesh", "dp=1,tp=2", "--json", "--out", str(tmp_path))
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "equal"
    assert [step["step"] for step in report["steps"]] == [0, 1, 2]
    assert all(step["relative_difference"] <= 1e-5 for step in report["steps"])
    assert report["steps"][2]["one_device"] < report["steps"][0]["one_device"]
    counts = {(c["axis"], c["op"], c["purpose"]): c["count"] for c in report["collectives_per_step"]}
    # four layers: attention and MLP in and out of each, the embedding, the last norm
    assert counts["tp", "reduce_scatter", "activations"] == counts["tp", "all_gather", "activations"] == 9
    # all logits of a part of the tokens, and their gradient back; the sums and counts of the parts
    assert counts["tp", "all_to_all", "activations"] == counts["tp", "all_to_all", "activations' gradients"] == 1
    assert counts["tp", "all_reduce", "loss"] == counts["tp", "all_reduce", "parameters' gradients"] == 1
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "lm_head.init:weight:*:place(dp=R,tp=S(0))" in (tmp_path / "program.txt").read_text()
    assert ElementTree.parse(tmp_path / "loss.svg").getroot().tag.endswith("svg")


def test_demo_with_parameters_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO-3: an axis that is left out has one rank; one gather a unit forward, one more a layer backward."""
    assert main(["demo", "--steps", "1", "--mesh", "dp=2", "--plan", "llama-zero3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "equal" and report["plan"] == "plan_zoo/llama_zero3.yaml"
    counts = {(c["axis"], c["op"], c["purpose"]): c["count"] for c in report["collectives_per_step"]}
    assert counts == {
        ("dp", "all_gather", "parameters"): 4 + 4 + 1,
        ("dp", "reduce_scatter", "parameters' gradients"): 4 + 1,
        ("dp", "all_reduce", "parameters' gradients"): 1,  # a byte for each parameter: was it used
        ("dp", "all_reduce", "loss"): 1,
    }


def test_demo_says_when_losses_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """And prints both tables."""
    assert main(["demo", "--steps", "1", "--mesh", "dp=2,tp=1", "--tolerance=-1"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out and "Loss of each step" in out and "parameters' gradients" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "at least one step"),
        (["--mesh", "dp=2,mp=2"], "the plan has no axis 'mp'; give sizes of dp, tp"),
        (["--plan", "lama"], "did you mean 'llama'"),
        (["--mesh", "dp=1,tp=3"], "tp=3"),
        (["--mesh", "tp"], "axis=size"),
        (["--mesh", "dp=64,tp=1"], "16 or fewer"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def crash(job: str, rank: int, send: Any) -> None:
    send(("pid", os.getpid()))
    time.sleep(2.0)
    if rank == 1 and job == "raise":
        raise RuntimeError("this rank has had enough")
    if rank == 1 and job == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(
    ("job", "message"), [("raise", "rank 1 failed.*\n.*had enough"), ("kill", "rank 1 died with exit code -9")]
)
def test_a_crashing_rank_ends_all(job: str, message: str) -> None:
    pids = []
    with pytest.raises(ProcessFailed, match="(?s)" + message):
        for _, (_, pid) in messages(crash, 2, job):
            pids.append(pid)
    assert len(pids) == 3
    wait_for_end(pids)


# A test run in the background (nohup, some CI) hands an ignored SIGINT down to its children: listen to it again.
_INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.cli.test_demo import crash
from vescale.debug import messages

if __name__ == "__main__":
    for rank, (kind, pid) in messages(crash, 2, "wait"):
        print(pid, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group; a kill only the command itself."""
    script = tmp_path / "interrupted.py"
    script.write_text(_INTERRUPTED)
    root = str(Path(__file__).parent.parent.parent)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(3)]
    if how is signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    process.wait(20)
    wait_for_end(pids)


def test_chart_is_self_contained() -> None:
    text = loss_chart([3.0, 2.5, 2.0], [3.0, 2.5, 2.0], "dp=2 x tp=2", 0.0)
    assert "href" not in text and "<script" not in text
    assert len(ElementTree.fromstring(text).findall("{http://www.w3.org/2000/svg}polyline")) == 2
    loss_chart([3.0], [3.0], "tp=2", 0.0)  # one step, no range
