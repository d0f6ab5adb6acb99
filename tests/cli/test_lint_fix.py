"""``vescale lint`` finds what a forward would communicate; ``--fix`` writes the entries that it is sure of."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import vescale
from vescale.cli import main
from vescale.cli._lint import _rows
from vescale.compat.simulated_ranks import fake_world

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q_proj, self.o_proj = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.o_proj(torch.tanh(self.q_proj(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Reading(Net):
    def forward(self, x):
        return super().forward(x) if float(x.sum().detach().numpy()) > 0 else x


class Asserting(Net):
    def forward(self, x):
        assert x.sum().detach().numpy() is None
        return super().forward(x)


class Wordless(Net):
    def forward(self, x):
        if not x.is_meta:
            raise AssertionError
        return super().forward(x)
"""
GOOD = """version: 1
mesh: {tp: 2}
shard:
  # columns, then rows
  'layers.\\d.q_proj.(weight|bias)': {tp: S(0)}
  layers.\\d.q_proj.<in>: {tp: R}
  layers.\\d.o_proj.weight: {tp: S(1)}
  layers.\\d.o_proj.<out>: {tp: R}
"""
INPUT = ("--model", "net.py:Net", "--input", "x=4x8")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)

    def run(plan: str, *arguments: str) -> tuple[int, str]:
        Path("plan.yaml").write_text(plan)
        code = main(["lint", "plan.yaml", *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_good_plan_has_no_findings(run: Callable[..., tuple[int, str]]) -> None:
    assert run(GOOD, *INPUT) == (0, "no findings\n")


def test_a_norm_whose_weight_alone_is_cut(run: Callable[..., tuple[int, str]]) -> None:
    code, out = run(GOOD + "  layers.\\d.norm.weight: {tp: S(0)}\n", *INPUT)
    assert code == 1 and "warning[implicit]" in out
    assert "the parameter 'weight' as tp=S(0) but needs tp=R" in out and "layers.0.norm (forward" in out
    assert "write `layers.\\d+.norm.weight: {tp: R}`" in out


def test_rows_that_are_cut_as_columns(run: Callable[..., tuple[int, str]]) -> None:
    """``o_proj.weight: S(0)``: its input, cut by features, is gathered."""
    wrong = GOOD.replace("o_proj.weight: {tp: S(1)}", "o_proj.weight: {tp: S(0)}")
    code, out = run(wrong, *INPUT, "--json")
    found = json.loads(out)["findings"]
    assert code == 1 and {each["rule"] for each in found} == {"implicit"}
    assert any("o_proj" in each["problem"] and "needs tp=R" in each["problem"] for each in found)
    assert run(wrong, *INPUT, "--ignore", "implicit")[0] == 0


@pytest.mark.parametrize(("entry", "is_used"), [("<out:0>", True), ("<out:logits>", False), ("<out:3>", False)])
def test_entries_of_outputs_that_name_nothing(run: Callable[..., tuple[int, str]], entry: str, is_used: bool) -> None:
    _, out = run(GOOD + f"  layers.\\d.q_proj.{entry}: {{tp: S(-1)}}\n", *INPUT, "--json")
    found = [each["problem"] for each in json.loads(out)["findings"] if each["rule"] == "unused-output"]
    assert bool(found) != is_used and all("matches nothing" in problem and entry in problem for problem in found)


def test_stages_of_a_pipeline_are_looked_at(run: Callable[..., tuple[int, str]]) -> None:
    staged = (
        GOOD.replace("{tp: 2}", "{pp: 2, tp: 2}") + "pipeline: {split_before: [layers.3], microbatches: 2, loss: out}\n"
    )
    assert run(staged, *INPUT) == (0, "no findings\n")
    code, out = run(staged.replace("pipeline:", "  layers.\\d.norm.weight: {tp: S(0)}\npipeline:"), *INPUT)
    assert code == 1 and "the parameter 'weight' as tp=S(0) but needs tp=R" in out


def test_fix_writes_entries_that_run_without_implicit_communication(run: Callable[..., tuple[int, str]]) -> None:
    wrong = GOOD.replace("o_proj.weight: {tp: S(1)}", "o_proj.weight: {tp: S(0)}")
    code, out = run(wrong, *INPUT, "--fix")
    assert code == 0 and out.count("written: ") == 1 and "o_proj.<in:0>: {tp: R}" in out
    text = Path("plan.yaml").read_text()
    kept = [line for line in text.splitlines() if "<in:0>" not in line]
    assert kept == wrong.splitlines()  # all other lines, and comments, are as they were
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == ["net.py", "plan.yaml"]
    for plan, is_refused in ((text, False), (wrong, True)):  # the engine in strict mode agrees
        Path("plan.yaml").write_text(plan)
        with fake_world(2, 0), pytest.raises(vescale.ImplicitCommunicationError) if is_refused else nullcontext():
            namespace: dict[str, Any] = {}
            exec(MODEL, namespace)
            model = vescale.parallelize(namespace["Net"](), vescale.Plan.from_yaml("plan.yaml"), strict=True)
            model(torch.ones(4, 8)).sum().backward()


def test_fix_changes_an_entry_that_says_otherwise(run: Callable[..., tuple[int, str]]) -> None:
    code, out = run(GOOD + "  layers.\\d+.norm.weight: {tp: S(0)}  # why\n", *INPUT, "--fix")
    assert code == 0, out
    assert "layers.\\d+.norm.weight: {tp: R}  # why\n" in Path("plan.yaml").read_text()


def test_fix_writes_nothing_into_plans_that_need_nothing(run: Callable[..., tuple[int, str]]) -> None:
    assert run(GOOD, *INPUT, "--fix") == (0, "no findings\n")
    assert Path("plan.yaml").read_text() == GOOD
    broken = GOOD.replace("o_proj.weight", "oproj.weight")
    assert run(broken, *INPUT, "--fix")[0] == 1
    assert Path("plan.yaml").read_text() == broken
    assert main(["lint", "llama", *INPUT, "--mesh", "dp=1,tp=2", "--fix"]) == 2


@pytest.mark.parametrize("fix", [(), ("--fix",)], ids=["", "fix"])
@pytest.mark.parametrize("model", ["Reading", "Asserting", "Wordless"])
def test_a_forward_that_cannot_be_followed_is_told_of(
    run: Callable[..., tuple[int, str]], model: str, fix: tuple[str, ...]
) -> None:
    """Also an error without a message, and nothing is written."""
    code, out = run(GOOD, "--model", f"net.py:{model}", "--input", "x=4x8", *fix)
    assert code == 0 and "implicit communication was not checked" in out, out
    assert Path("plan.yaml").read_text() == GOOD and not list(Path().glob("tmp*"))


def test_every_rank_has_as_many_rows() -> None:
    """A batch smaller than the mesh communicates where the plan's own does not."""
    for mesh, rows in (({"dp": 2, "tp": 4}, 8), ({"dp": 3}, 9), ({"dp": 12, "tp": 2}, 12), ({"a": 4, "dp": 5}, 10)):
        plan = vescale.Plan(mesh).shard("<in:x>", {"dp": Shard(0)})
        assert _rows(plan) == rows, mesh
