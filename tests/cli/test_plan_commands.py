"""lint, explain, diff, zoo and env: what they print, as JSON too, and their exit codes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vescale import plan_zoo
from vescale.cli import main
from vescale.compat import OTHER_CHANGES, PATCHES, is_installed, patch_states, uninstall_part

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())

def make():
    net = Net()
    assert net.fc1.weight.is_meta, "built with memory"
    return net

def broken():
    raise KeyError("no such size")

def number():
    return 3

class Models:
    Inner = Net
"""

PLAN = """\
mesh: {tp: 2}
shard:
  <in:x>: {tp: R}
  fc1.(weight|bias): {tp: S(0)}
  fc2.weight: {tp: S(1)}
  <out>: {tp: R}
"""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with a model, a config and a plan."""
    name = f"net_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    (tmp_path / "unknown.json").write_text(json.dumps(CONFIG | {"model_type": "lama"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])

    def call(*arguments: str) -> tuple[int, str, str]:
        arguments = tuple(argument.replace("net:", f"{name}:") for argument in arguments)
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call


LLAMA = ("--model", "hf:llama.json", "--mesh", "dp=2,tp=2")


def test_lint_finds_nothing_in_good_plans(run: Run) -> None:
    assert run("lint", "plan.yaml", "--model", "net:make") == (0, "no findings\n", "")
    assert run("lint", "llama", *LLAMA)[0] == 0
    code, out, _ = run("lint", "llama", *LLAMA, "--json")
    assert code == 0 and json.loads(out)["findings"] == []


def test_a_configuration_is_a_file_a_folder_or_a_repository_of_the_hub(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = Path("hub")  # as huggingface_hub lays it out
    snapshot = cache / "models--some--llama" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    shutil.copy("llama.json", snapshot / "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.resolve()))
    for model in ("llama.json", "hf:llama.json", str(snapshot), f"hf:{snapshot}", "hf:some/llama"):
        assert run("lint", "llama", "--model", model, "--mesh", "dp=2,tp=2")[:2] == (0, "no findings\n"), model
    code, _, err = run("lint", "llama", "--model", "hf:some/other", "--mesh", "dp=2,tp=2")
    assert code == 2 and "hf:some/other: the file was not found on the Hub" in err


def test_lint_prints_each_finding_on_a_line_of_its_own(run: Run) -> None:
    code, out, _ = run("lint", "llama", "--model", "hf:llama.json", "--mesh", "dp=2,tp=4")
    lines = out.splitlines()
    assert code == 1 and len(lines) == 2
    assert lines[0].startswith(f"{plan_zoo.path_of('llama')}:")
    assert "error[head]: model.layers.0-1.self_attn.k_proj.weight" in lines[0]
    assert "replicate k and v on tp ({tp: R}), or use a number of ranks that divides 2, for example 2" in lines[0]
    assert lines[1] == "1 error, 0 warnings"
    code, out, _ = run("lint", "llama", "--model", "hf:llama.json", "--mesh", "dp=2,tp=4", "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 1 and (finding["severity"], finding["rule"]) == ("error", "head")
    assert finding["line"] > 1 and "model.layers.1.self_attn.v_proj.weight" in finding["names"]


def test_lint_reports_plans_that_cannot_be_read(run: Run) -> None:
    Path("bad.yaml").write_text("mesh: {tp: 2}\nshard:\n  fc1.weight: {tpp: S(0)}\n")
    code, out, _ = run("lint", "bad.yaml", "--model", "net:Net")
    assert code == 1
    assert out.startswith("bad.yaml:3:16: error[plan]: the mesh has no axis 'tpp' (axes: tp); did you mean 'tp'?")


def test_lint_warns_and_can_be_told_not_to(run: Run) -> None:
    code, out, _ = run("lint", "plan.yaml", "--model", "net:make", "--mesh", "tp=2,dp=2")
    assert code == 1 and "warning[unused-axis]" in out and out.endswith("0 errors, 1 warning\n")
    assert run("lint", "plan.yaml", "--model", "net:make", "--mesh", "tp=2,dp=2", "--ignore", "unused-axis")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lint", "missing.yaml", "--model", "net:make"), "there is no file 'missing.yaml'"),
        (
            ("lint", "lama", "--model", "net:make"),
            f"'lama' is neither a file nor a plan of the zoo ({', '.join(plan_zoo.names())}); did you mean 'llama'?",
        ),
        (("lint", "llama", "--model", "net:make"), "pass --mesh, such as dp=2,tp=4"),
        (("lint", "llama", "--model", "net:make", "--mesh", "dp2"), "write a mesh as dp=2,tp=4"),
        (("lint", "plan.yaml", "--model", "net:mak"), "has no mak"),
        (("lint", "plan.yaml", "--model", "nomodule:make"), "No module named 'nomodule'"),
        (("lint", "plan.yaml", "--model", "net:broken"), "calling broken() raised KeyError: 'no such size'"),
        (("lint", "plan.yaml", "--model", "net:number"), "returned an int, not a torch.nn.Module"),
        (
            ("lint", "plan.yaml", "--model", "justaname"),
            "expected a config.json of transformers or diffusers, the folder",
        ),
        (("lint", "plan.yaml", "--model", "hf:."), "the folder has no config.json"),
        (("lint", "plan.yaml", "--model", "hf:unknown.json"), "no model_type 'lama'; did you mean 'llama'?"),
        (("lint", "plan.yaml", "--model", "hf:none.json"), "no such file"),
        (("lint", "plan.yaml", "--model", "hf:plan.yaml"), "not JSON"),
        (("explain", "plan.yaml", "--model", "net:make", "--input", "x=8by8"), "write NAME=SHAPE[:DTYPE]"),
        (("diff", "plan.yaml", "nothing.yaml"), "there is no file 'nothing.yaml'"),
        (("diff", "plan.yaml", "llama", "--model", "net:make", "--mesh", "dp=2,tp=2"), "mistakes in the plan"),
        (("zoo", "show", "lama"), "did you mean 'llama'?"),
    ],
)
def test_bad_usage(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith(f"vescale {arguments[0]}: ")


@pytest.mark.parametrize("arguments", [("lint",), ("bogus",), ("diff", "a"), ("explain", "x", "--batch", "0")])
def test_bad_arguments_exit_with_two(run: Run, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2


def test_explain(run: Run) -> None:
    code, out, err = run("explain", "llama", *LLAMA, "--batch", "4", "--seq", "16")
    assert (code, err) == (0, "")
    for line in (
        "Plan llama: 16 entries on dp=2, tp=2",
        "model.layers.0-1.mlp.forward_pre:<in>:*:redist(->tp=R)",
        "for input_ids 4x16, labels 4x16",
    ):
        assert line in out.splitlines()
    rows = [line.split() for line in out.splitlines()]
    assert ["model.layers.0-1.mlp.down_proj", "forward_post", "1", "2"] in rows
    assert ["tp", "fwd", "all_gather", "5", "20.0", "KiB"] in rows
    assert ["tp", "bwd", "reduce_scatter", "5", "20.0", "KiB"] in rows
    assert "unknown" not in out


STAGES = "include: [llama.yaml]\npipeline: {split_before: [model.layers.1], microbatches: 12, mesh: pp}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "llama_zero3", *LLAMA),
        ("explain", "staged.yaml", "--model", LLAMA[1], "--mesh", "dp=1,tp=1,pp=2"),
        ("lint", "llama", "--model", LLAMA[1], "--mesh", "tp=3,dp=1"),
        ("diff", "llama", "llama_zero3", *LLAMA),
        ("plan", "new", LLAMA[1], "--mesh", "dp=2,tp=2", "--zero", "3"),
        ("estimate", "llama_zero3", *LLAMA, "--batch", "4", "--seq", "16", "--zero-table", "--what-if", "stage=2"),
        ("env", "--patches"),
        ("zoo",),
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_output_fits_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("staged.yaml").write_text(STAGES)
    shutil.copy(plan_zoo.path_of("llama"), "llama.yaml")
    code, out, err = run(*arguments)
    assert code == (arguments[0] in ("lint", "diff")) and not err
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_explain_begins_with_memory_and_collectives(run: Run) -> None:
    out = run("explain", "llama", *LLAMA)[1]
    titles = ("Parameters and buffers", "Predicted collectives", "Plan llama", "Units", "Hooks", "Instructions")
    places = [out.index(title) for title in titles]
    assert places == sorted(places) and places[0] == 0


@pytest.mark.parametrize("command", ["lint", "explain", "verify", "estimate", "search", "plan new"])
def test_options_mean_the_same_everywhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for option in (
        "--batch N rows of the global batch",
        "--seq N length of a row",
        "--input NAME=SHAPE[:DTYPE] global shape and dtype of an input",
    ):
        assert option in text


def test_explain_only_one_section(run: Run) -> None:
    code, out, _ = run("explain", "plan.yaml", "--model", "net:make", "--only", "ir")
    assert code == 0 and out.splitlines()[0] == "forward_pre:<in>:x:wrap(tp=R)"
    code, out, _ = run("explain", "plan.yaml", "--model", "net:make", "--only", "collectives")
    assert code == 0 and "pass --input NAME=SHAPE[:DTYPE]" in out
    code, out, _ = run("explain", "plan.yaml", "--model", "net:make", "--only", "collectives", "--input", "x=8x8")
    assert ["<out>", "fwd", "tp", "all_reduce", "1", "256", "B"] in [line.split() for line in out.splitlines()]


def test_explain_as_json(run: Run) -> None:
    code, out, _ = run("explain", "llama", *LLAMA, "--batch", "4", "--seq", "16", "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == 0 and data["mesh"] == {"dp": 2, "tp": 2}
    totals = {(row["axis"], row["when"], row["op"]): row["calls"] for row in data["collectives"]["totals"]}
    assert totals["tp", "forward", "reduce_scatter"] == totals["tp", "backward", "all_gather"] == 5
    assert data["memory"]["first_rank_bytes"] < data["memory"]["model_bytes"] < 2 * data["memory"]["first_rank_bytes"]
    assert {"module": "model.layers.0-1.mlp", "hook": "forward_pre", "instructions": 1, "modules": 2} in data["hooks"]


def test_explain_of_gradient_buckets(run: Run) -> None:
    """Gradients, axes, bytes, and the ring model: 2 S (N-1)/N at once, the sum of 2 S (n-1)/n axis by axis."""
    Path("wide.yaml").write_text("mesh: {dp: 2, cp: 4}\nshard:\n  <in:x>: {dp: S(0), cp: S(0)}\n")
    arguments = ("explain", "wide.yaml", "--model", "net:make", "--input", "x=16x8")
    code, out, _ = run(*arguments, "--json")
    (bucket,) = json.loads(out)["collectives"]["buckets"]
    size = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    assert code == 0 and bucket.pop("seconds") > 0
    assert bucket == {
        "gradients": ["fc2.bias.grad", "fc2.weight.grad", "fc1.bias.grad", "fc1.weight.grad"],
        "axes": ["dp", "cp"],
        "ops": ["all_reduce"],
        "size_bytes": size,
        "bytes": 2 * size * 7 // 8,
        "axis_by_axis_bytes": 2 * size // 2 + 2 * size * 3 // 4,
    }
    code, out, _ = run(*arguments)
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "4", "dp,cp", "all_reduce", "1.1", "KiB", "1.9", "KiB", "2.7", "KiB"] in [row[:10] for row in rows]


def test_a_cut_over_two_axes(run: Run) -> None:
    """Explained as one: a unit over both, a quarter of the bytes on each rank, collectives of all ranks together."""
    ragged = "{init: Ragged, run: R}"
    text = "mesh: {fsdp: 2, ep: 2}\nshard:\n  <in:x>: {fsdp: S(0), ep: S(0)}\n  .*: {fsdp: %s, ep: %s}\n"
    Path("joint.yaml").write_text(text % (ragged, ragged))
    arguments = ("joint.yaml", "--model", "net:make")
    assert run("lint", *arguments)[:2] == (0, "no findings\n")
    code, out, _ = run("explain", *arguments, "--input", "x=16x8", "--json")
    data = json.loads(out)
    size = 4 * (8 * 16 + 16 + 16 * 8 + 8)
    (unit,) = data["units"]
    assert code == 0 and unit["shard"] == ["fsdp", "ep"] and size / 4 <= unit["resting_bytes"] <= size / 4 + 16
    assert unit["collectives"] == [
        {"when": when, "op": op, "axis": "fsdp,ep", "bytes": 3 * unit["resting_bytes"]}
        for when, op in (("forward", "all_gather"), ("backward", "reduce_scatter"))
    ]
    assert abs(data["memory"]["first_rank_bytes"] - size // 4) <= 4 * 16 and data["collectives"]["buckets"] == []
    Path("alone.yaml").write_text(text.replace(", ep: %s", "") % ragged)
    code, out, _ = run("diff", "alone.yaml", *arguments)
    assert code == 1 and "unit(shard=fsdp;replicate=ep;" in out and "unit(shard=fsdp,ep;" in out


def test_explain_refuses_what_does_not_fit(run: Run) -> None:
    code, out, _ = run("explain", "llama", "--model", "hf:llama.json", "--mesh", "dp=2,tp=4")
    assert code == 1 and "a shard boundary would fall inside an attention head" in out
    code, out, _ = run("explain", "llama", "--model", "hf:llama.json", "--mesh", "dp=2,tp=4", "--json")
    assert code == 1 and "attention head" in json.loads(out)["error"]


def test_diff_of_entries(run: Run) -> None:
    Path("other.yaml").write_text(PLAN.replace("<out>: {tp: R}", "<out>: {tp: S(1)}"))
    Path("same.yaml").write_text(PLAN.replace("  <in:x>: {tp: R}\n", "") + "  <in:x>: {tp: R}\n")
    assert run("diff", "plan.yaml", "same.yaml") == (0, "no differences\n", "")
    code, out, _ = run("diff", "plan.yaml", "other.yaml")
    assert (code, out) == (1, "- shard <out>: {tp: R}\n+ shard <out>: {tp: S(1)}\n")
    code, out, _ = run("diff", "plan.yaml", "other.yaml", "--json")
    assert code == 1 and json.loads(out)["added"] == ["shard <out>: {tp: S(1)}"]


def test_diff_of_programs(run: Run) -> None:
    text = plan_zoo.path_of("llama").read_text()
    Path("other.yaml").write_text(text.replace(".mlp.down_proj.<out>: {tp: S(1)}", ".mlp.down_proj.<out>: {tp: R}"))
    code, out, _ = run("diff", "llama", "other.yaml", *LLAMA)
    assert code == 1
    assert out == "~ model.layers.0-1.mlp.down_proj.forward_post:<out>:*:redist(->tp=S(1)) => redist(->tp=R)\n"
    code, out, _ = run("diff", "llama", "other.yaml", *LLAMA, "--json")
    assert code == 1 and len(json.loads(out)["changes"]) == 2
    assert run("diff", "llama", "llama", *LLAMA)[0] == 0


def test_zoo(run: Run) -> None:
    code, out, _ = run("zoo")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == list(plan_zoo.names())
    code, out, _ = run("zoo", "list", "--json")
    assert code == 0 and json.loads(out)[0]["axes"] == ["dp", "tp"]
    code, out, _ = run("zoo", "show", "llama")
    assert code == 0 and out == plan_zoo.path_of("llama").read_text()


def test_env(run: Run) -> None:
    short = run("env")[1]
    assert len(short.splitlines()) <= 40 and "\n  all " in short and f" in {len(PATCHES)} groups\n" in short
    code, out, _ = run("env", "--patches")
    assert code == 0 and "\npackages\n  torch " in out and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    data = json.loads(run("env", "--json")[1])
    assert data["torch"]["compat"] == "ok" and data["torch"]["gloo"] is True
    assert set(data["features"].values()) == {"ok"}
    assert len(data["patches"]) == len(PATCHES) and "problem" not in data["changes"]
    letters = words.replace(" ", "")
    num_changes = 0
    for patch in PATCHES:
        found = data["patches"][patch.purpose]
        assert (found["state"], found["owner"], found["issue"]) == ("installed", patch.owner, patch.issue)
        num_changes += len(found["changes"])
        shown = f"{patch.purpose} {len(found['changes'])} changed" if found["changes"] else f"{patch.purpose} installed"
        assert shown.replace(" ", "") in letters and patch.reason.replace(" ", "") in letters
    for one in patch_states():
        assert one.state != "installed" or tuple(data["patches"][one.patch.purpose]["changes"]) == one.changes
    assert not is_installed("observation"), "what the command installs is taken back"
    assert data["changes"] == {
        "patches": f"{num_changes} in {len(PATCHES)} groups",
        "other": f"{len(OTHER_CHANGES)} kinds",
    }
    assert f"patches {num_changes} in {len(PATCHES)} groups" in words
    for key, row in OTHER_CHANGES.items():
        assert data["other changes"][key]["target"] == row.target and row.reason.replace(" ", "") in letters


def test_env_tells_what_cannot_be_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall_part("stages")

    def fails() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("vescale.optim.extend_torch_for_stages", fails)
    data = json.loads(run("env", "--json")[1])
    assert data["changes"]["problem"] == "RuntimeError: planted"
    assert {group["state"] for group in data["patches"].values() if group["part"] == "stages"} == {"not installed"}
    assert "installed" in {group["state"] for group in data["patches"].values()}


def test_env_names_what_a_torch_lacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dispatch_keyset_full_after")
    code, out, _ = run("env")
    assert code == 0, "optional"
    words = " ".join(out.split())
    assert "observing collectives (hang report, communication trace, verify) unavailable: torch lacks" in words
    assert "_dispatch_keyset_full_after" in words


def test_models_by_other_names(run: Run) -> None:
    assert run("lint", "plan.yaml", "--model", "net:Net")[0] == 0
    assert run("lint", "plan.yaml", "--model", "net:Models.Inner")[0] == 0


def test_in_a_narrow_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are not cut or wrapped where a program reads them; with ``COLUMNS``, no line is longer."""
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, err = run("explain", "llama", *LLAMA, "--only", "hooks")
    assert code == 0, err
    assert any(line.split()[0] == "model.layers.0-1.self_attn.o_proj" for line in out.splitlines())
    monkeypatch.setenv("COLUMNS", "40")
    out = run("explain", "llama", *LLAMA, "--only", "hooks")[1]
    assert max(map(len, out.splitlines())) <= 40 and "model.layers.0-1.self_attn.o_proj" in "".join(out.split())


def test_explain_shows_the_sizes_of_uneven_cuts(run: Run) -> None:
    (Path.cwd() / "uneven.yaml").write_text("mesh: {tp: null}\nshard:\n  .*mlp.up_proj.weight: {tp: S(0)}\n")
    code, out, _ = run("explain", "uneven.yaml", "--model", "hf:llama.json", "--mesh", "tp=5", "--only", "memory")
    hidden = CONFIG["intermediate_size"]
    chunk = -(-hidden // 5)
    last = hidden - 4 * chunk
    assert code == 0 and f"4 x {chunk}, {last}" in out, out
    code, out, _ = run("explain", "uneven.yaml", "--model", "hf:llama.json", "--mesh", "tp=5", "--json")
    (row,) = json.loads(out)["uneven_cuts"]
    assert row["sizes"] == [chunk] * 4 + [last] and row["dim"] == 0 and row["axis"] == "tp"


def test_explain_shows_the_sizes_of_uneven_inputs(run: Run) -> None:
    Path("inputs.yaml").write_text(
        "mesh: {dp: 2, cp: 3}\nshard:\n  <in:input_ids>: {dp: S(0), cp: S(-1)}\n  <in:labels>: {dp: S(0), cp: S(0)}\n"
    )
    shapes = ("--input", "input_ids=5x7:int64", "--input", "labels=5x7:int64")
    code, out, _ = run("explain", "inputs.yaml", "--model", "hf:llama.json", "--only", "memory", *shapes)
    assert code == 0 and "<in:input_ids>" in out and "2 x 3, 1" in out, out
    code, out, _ = run("explain", "inputs.yaml", "--model", "hf:llama.json", "--json", *shapes)
    assert [(row["name"], row["dim"], row["axis"], row["sizes"]) for row in json.loads(out)["uneven_cuts"]] == [
        ("<in:input_ids>", 0, "dp", [3, 2]),
        ("<in:input_ids>", 1, "cp", [3, 3, 1]),
        ("<in:labels>", 0, "dp,cp", [1, 1, 1, 1, 1, 0]),
    ]


def test_lint_knows_the_blocks_of_an_optimizer(run: Run) -> None:
    Path("wide.py").write_text(MODULE.replace("8, 16", "96, 80").replace("16, 8", "80, 96"))
    rest = "mesh: {dp: 4, tp: 2}\nshard:\n  <in:x>: {dp: S(0)}\n  .*: {dp: {init: %s, run: R}}\n"
    Path("rows.yaml").write_text(rest % "Ragged")
    Path("blocks.yaml").write_text(rest % "Ragged(block=256)")
    Path("columns.yaml").write_text(rest % "Ragged(block=256)" + "  fc2.weight: {tp: S(1)}\n  fc1.weight: {tp: S(0)}\n")
    same = ("--model", "wide:make", "--ignore", "unused-axis", "--ignore", "implicit")

    def found(plan: str, optimizer: str) -> list[dict[str, Any]]:
        code, out, _ = run("lint", plan, *same, "--optimizer", optimizer, "--json")
        findings = [f for f in json.loads(out)["findings"] if f["rule"] == "optimizer-block"]
        assert code == 1 or not findings
        return findings

    rows = found("rows.yaml", "adamw8bit")
    assert [f["names"] for f in rows] == [["fc1.weight"], ["fc2.weight"]] and rows[0]["line"] == 4
    assert "shares of 96 elements; write Ragged(block=256) at rest" in rows[0]["problem"]
    assert found("blocks.yaml", "adamw8bit") == [] == found("rows.yaml", "adamw8bit:min_numel=7681")
    assert [f["names"] for f in found("rows.yaml", "adamw8bit:block_size=96")] == [["fc2.weight"]]
    assert len(found("rows.yaml", "adamw8bit:block=8x2048")) == 2 and found("rows.yaml", "adamw8bit:block=1x2048") == []
    (column,) = found("columns.yaml", "adamw8bit")
    assert column["names"] == ["fc2.weight"] and "divides block 0 (elements 0 to 255)" in column["problem"]
    assert all(
        f["rule"] != "optimizer-block" for f in json.loads(run("lint", "rows.yaml", *same, "--json")[1])["findings"]
    )
    for text in ("adamw", "adamw8bit:block_size=0", "adamw8bit:block=32"):
        code, _, error = run("lint", "rows.yaml", *same, "--optimizer", text)
        assert code == 2 and "adamw8bit:block_size=128,min_numel=4096" in error
