"""``vescale advise`` as a user meets it: figures, exit codes, broken input, the page."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vescale.buffer import plan_layout, shape_list
from vescale.cli import main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "quantization_config": {"quant_method": "mxfp4"},
}


def advise(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["advise", *map(str, arguments)])
    except SystemExit as exit:  # argparse
        code = int(exit.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code, out, _ = advise(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_the_papers_case(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-OSS, 128 rows: 17.5 % in a layer at 1,024 ranks, inherent to one buffer; two buffers need a third of it."""
    code, found = as_json(
        capsys, "gpt-oss-120b", "--granularity", "16,128", "--ranks", "256..1024:x2", "--across-experts"
    )
    assert code == 1, "no size keeps 128 rows within 1 %"
    assert [unit["count"] for unit in found["units"]] == [1, 36]
    assert found["num_matched"] == 2
    few, many = found["granularities"]
    assert [size["num_shards"] for size in many["sizes"]] == [256, 512, 1024]
    last = many["sizes"][-1]
    assert last["worst_unit"] == "model.layers.0"
    assert last["worst_padding"] == pytest.approx(0.17485, abs=1e-5)
    assert last["proven"]
    assert last["inherent"] == pytest.approx(last["padding"])
    assert last["two_buffers"] < 0.058
    # The whole model's padding, put together by hand.
    wasted = elements = 0
    for unit in shape_list("gpt-oss-120b").units:
        numels, blocks = [], []
        for name, shape in unit.parameters:
            numel = 1
            for size in shape:
                numel *= size
            numels.append(numel)
            blocks.append(128 * shape[-1] if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") else 1)
        layout = plan_layout(numels, blocks, 1024, 8)
        wasted += unit.count * layout.padding
        elements += unit.count * layout.num_elements
    assert last["padding"] == pytest.approx(wasted / elements)
    assert few["largest_within"] == {"max_padding": 0.01, "num_shards": 256}


def test_rows_that_cross_experts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = advise(capsys, "gpt-oss-120b", "--granularity", "120,128", "--ranks", "8")
    flat = " ".join(out.split())
    assert code == 1
    assert "Blocks of 128 rows: refused." in flat
    assert "'model.layers.0.mlp.experts.gate_up_proj'" in flat
    assert "Nearest sizes that work: 120 or 144" in flat
    assert "--across-experts" in flat
    assert "Blocks of 120 rows, padding" in flat
    code, found = as_json(capsys, "gpt-oss-120b", "--granularity", "128", "--ranks", "8")
    assert code == 1
    assert found["granularities"][0]["sizes"] == []
    assert "does not divide the 2880" in found["granularities"][0]["refused"]


def test_no_size_within_the_limit_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("llama-3-70b", "--granularity", "128", "--ranks", "256,512")
    code, out, _ = advise(capsys, *call)
    assert code == 1
    assert "No size within 1.00 %; 256 ranks come closest (116 %)" in " ".join(out.split())
    assert advise(capsys, *call, "--max-padding", "200")[0] == 0


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8..40", [8, 16, 24, 32, 40]),
        ("8..40:16", [8, 24, 40]),
        ("8..64:x2", [8, 16, 32, 64]),
        ("12, 4,4", [4, 12]),
        ("3..3,1..2", [1, 2, 3]),
    ],
)
def test_ranges(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, sizes: list[int]) -> None:
    (tmp_path / "shapes.json").write_text("[[64, 64]]")
    _, found = as_json(capsys, tmp_path / "shapes.json", "--granularity", "1", "--ranks", text)
    assert [size["num_shards"] for size in found["granularities"][0]["sizes"]] == sizes


def test_a_hugging_face_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for model in (f"hf:{file}", str(file)):
        code, found = as_json(capsys, model, "--granularity", "1", "--ranks", "4")
        assert code == 0
        assert [(u["path"], u["count"], u["num_parameters"]) for u in found["units"]] == [
            ("(root)", 1, 3),
            ("model.layers.0", 3, 9),
        ]
        assert found["num_matched"] == 3


def test_shapes_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    for shapes in ([[64, 32], [7]], {"a": [64, 32], "b": [7]}, [["a", [64, 32]], ["b", [7]]]):
        file.write_text(json.dumps(shapes))
        _, found = as_json(capsys, file, "--match", ".*a.*|.*0", "--granularity", "16", "--ranks", "4")
        assert found["num_matched"] == 1
        assert found["granularities"][0]["sizes"][0]["padding"] == pytest.approx((4 * 1024 - 2055) / 2055)
    file.write_text(shape_list("llama-3-70b").to_json())
    _, found = as_json(capsys, file, "--granularity", "1", "--ranks", "8")
    assert found["model"] == "llama-3-70b"


BROKEN = {
    '{"model_type": "lama"}': "has no model_type 'lama'",
    '{"hidden_size": 5}': "the shape of 'hidden_size' is 5",
    '{"a": [1, 2}': "1:12: not JSON",
    "[]": "no shapes",
    "3": "holds 3; expected shapes",
    "[[64, -3]]": "the shape of 'tensor0' is [64, -3]",
    "[[2.5]]": "the shape of 'tensor0' is [2.5]",
    '[["a", [3]], ["a", [4]]]': "'a' occurs twice",
    '{"format": "other"}': "not a shape list",
    '{"format": "vescale.shapes", "name": "", "source": "", "units": []}': "no shapes",
    '{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7}': "cannot build this model",
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    code, out, err = advise(capsys, file)
    assert (code, out) == (2, "")
    assert err.startswith("vescale advise: ")
    assert "broken.json" in err
    assert BROKEN[text] in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["gpt-os-120b"], "Did you mean gpt-oss-120b?"),
        (["no/such/file.json"], "neither a file nor a shipped shape list"),
        (["llama-3-70b", "--ranks", "8..4"], "'8..4' is empty"),
        (["llama-3-70b", "--ranks", "many"], "'many' is no number or range"),
        (["llama-3-70b", "--ranks", "8..16:x1"], "is empty"),
        (["llama-3-70b", "--ranks", "1..100000"], "more than 4096"),
        (["llama-3-70b", "--ranks", "99999999999..999999999999999:1"], "more than 4096"),
        (["llama-3-70b", "--granularity", "0"], "--granularity '0'"),
        (["llama-3-70b", "--effort", "quick"], "expected fast, thorough or a positive number"),
        (["llama-3-70b", "--alignment", "0"], "expected at least 1"),
        (["llama-3-70b", "--max-padding", "nan"], "--max-padding is nan"),
        (["llama-3-70b", "--match", "("], "not a regular expression"),
        (["llama-3-70b", "--match", "nothing", "--ranks", "8"], "matches no parameter; names are like model.embed"),
        (["llama-3-70b", "--html", "no/such/folder/page.html"], "folder does not exist"),
        (["llama-3-70b", "--html", ".", "--ranks", "8"], "cannot write --html ."),
        ([], "MODEL"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    code, out, err = advise(capsys, *arguments)
    assert (code, out) == (2, "")
    assert part in err


class Outline(HTMLParser):
    """Counts tags, checks that they nest, and collects whatever is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("ranks", ["8", "8..64:x2", "8..512"])
def test_the_page(capsys: pytest.CaptureFixture[str], tmp_path: Path, ranks: str) -> None:
    file = tmp_path / "page.html"
    code, out, _ = advise(capsys, "gpt-oss-120b", "--granularity", "1,128", "--ranks", ranks, "--html", file)
    assert code == 1
    assert f"written: {file}" in "".join(out.split("\n"))
    text = file.read_text("utf-8")
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert outline.loaded == []
    assert "http" not in text
    assert outline.counts["svg"] == 1, "a chart for each granularity that is not refused"
    assert outline.counts["circle"] == len(range(8, 513, 8)) if ranks == "8..512" else True
    assert "Refused." in text
    assert "nan" not in text


def test_names_are_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shapes = tmp_path / "<b>.json"
    shapes.write_text('{"<i>.0.up_proj": [8, 8]}')
    advise(capsys, shapes, "--granularity", "1", "--ranks", "2", "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<b>" not in text
    assert "<i>.0" not in text


def test_the_command_and_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vescale", "advise", "list"], capture_output=True, text=True, check=True
    )
    assert "deepseek-v3" in done.stdout.split()
    for arguments, part in ((["--help"], "advise"), (["advise", "--help"], "--granularity")):
        done = subprocess.run([sys.executable, "-m", "vescale", *arguments], capture_output=True, text=True, check=True)
        assert part in done.stdout


def test_blocks_of_an_optimizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Blocks of 256 elements make the padding that the planner finds with them, and small parameters none."""
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([["a.weight", [100, 50]], ["b.bias", [50]]]))
    call = (file, "--granularity", "1", "--ranks", "8", "--alignment", "1")
    _, plain = as_json(capsys, *call)
    _, blocks = as_json(capsys, *call, "--optimizer", "adamw8bit")
    _, none = as_json(capsys, *call, "--optimizer", "adamw8bit:min_numel=5001")
    sizes = [found["granularities"][0]["sizes"][0] for found in (plain, blocks, none)]
    assert sizes[0] == sizes[2] != sizes[1] and blocks["optimizer"]["block_size"] == 256
    layout = plan_layout([5000, 50], [256, 1], 8, 1)
    assert sizes[1]["padding"] == layout.padding / 5050
