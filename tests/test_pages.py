"""The pages of the site: their blocks run, their tables name what exists, their links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.page_preludes import ALONE, BY_TESTS, ELSEWHERE, PRELUDES, RANKS, SETUPS, WHOLE, Alone
from tests.ranks import RankPools
from vescale.cli._main import COMMANDS
from vescale.compat import uninstall
from vescale.plans import Plan

ROOT = Path(__file__).parent.parent
PAGES = ["index", "how-to", "coming-from", "from-torchtitan", "choose", "all", "questions"]
CHAPTERS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks(page: str, folder: str) -> dict[str, Any]:
    """All blocks of a page, one after the other, as one script on this rank."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": page}
    found = blocks(ROOT / page)
    assert found
    for block in found:
        exec(compile(block, page, "exec"), space)
    return (
        {name: value for name, value in space.items() if name == "loss"}
        if "loss" not in space
        else {"loss": space["loss"].item()}
    )


def run_pages(pages: list[str], folder: str) -> list[dict[str, Any]]:
    results = []
    for page in pages:
        results.append(run_blocks(page, folder))
        dist.barrier()
    return results


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_blocks_run_on_any_number_of_ranks(ranks: RankPools, tmp_path: Path, world_size: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pages = [f"docs/{page}.md" for page in PAGES]
    found = ranks.run(run_pages, pages, str(tmp_path), world_size=world_size)
    assert all(losses == found[0] for losses in found)


@pytest.mark.parametrize(
    ("chapter", "world_size"),
    [
        pytest.param(chapter, size, marks=[] if (chapter.stem[0], size) == ("3", 2) else [pytest.mark.slow])
        for chapter in CHAPTERS
        for size in (1, 2, 4)
    ],
    ids=lambda value: getattr(value, "stem", value),
)
def test_chapters_of_the_tutorial_run(chapter: Path, world_size: int, ranks: RankPools, tmp_path: Path) -> None:
    """With the answers of the exercises."""
    assert chapter.read_text().count("<summary>Answer</summary>") == len(
        re.findall(r"^\*\*\d\.\*\*", chapter.read_text(), re.MULTILINE)
    )
    ranks.run(run_blocks, str(chapter.relative_to(ROOT)), str(tmp_path), world_size=world_size)


def run_reference(page: str, prelude: str, folder: str) -> int:
    """The blocks of a reference page, one after the other, behind what the page leaves out."""
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": page}
    exec(compile(prelude, f"{page}: prelude", "exec"), space)
    found = [
        (number, block)
        for number, block in enumerate(blocks(ROOT / "docs" / f"{page}.md"))
        if (page, number) not in {**ALONE, **BY_TESTS}
    ]
    for number, block in found:
        exec(compile(SETUPS.get((page, number), ""), f"{page}: before block {number}", "exec"), space)
        exec(compile(block, f"{page}: block {number}", "exec"), space)
    dist.barrier()
    return len(found)


DAILY_REFERENCE = {"fsdp"}


def marks(page: str) -> list[pytest.MarkDecorator]:
    slow = [] if page in DAILY_REFERENCE else [pytest.mark.slow]
    return [*slow, pytest.mark.helper("dispatch")] if page == "static" else slow


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page)) for page in PRELUDES])
def test_blocks_of_reference_pages_run(page: str, ranks: RankPools, tmp_path: Path) -> None:
    assert min(ranks.run(run_reference, page, PRELUDES[page], str(tmp_path), world_size=RANKS.get(page, 2))) > 0


def run_alone(page: str, number: int, alone: Alone, folder: str) -> None:
    os.chdir(folder)
    space: dict[str, Any] = {"__name__": page}
    found = [alone.before, blocks(ROOT / "docs" / f"{page}.md")[number], alone.after]
    for part, code in zip(("before", "", "after"), found, strict=True):
        exec(compile(code, f"{page}: {part} block {number}", "exec"), space)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), ALONE)
def test_blocks_that_run_alone(
    page: str, number: int, ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ALONE[page, number]
    if alone.ranks:
        ranks.run(run_alone, page, number, alone, str(tmp_path), world_size=alone.ranks)
        return
    monkeypatch.chdir(tmp_path)
    run_alone(page, number, alone, str(tmp_path))


def test_every_block_of_python_runs_somewhere() -> None:
    assert set(WHOLE) == set(PAGES)
    missing = []
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "internals").glob("*.md")]):
        page = str(path.relative_to(ROOT / "docs").with_suffix(""))
        for number, block in enumerate(blocks(path)):
            ast.parse(block)
            if page not in {*WHOLE, *ELSEWHERE, *PRELUDES} and (page, number) not in {**ALONE, **BY_TESTS}:
                missing.append(f"{path.name}, block {number}: give it a prelude in tests/page_preludes.py")
    assert not missing, "\n".join(missing)
    named = [*ALONE, *BY_TESTS, *SETUPS]
    pages = {page: len(blocks(ROOT / "docs" / f"{page}.md")) for page, _ in named}
    assert all(number < pages[page] for page, number in named), "the tables name blocks that are not there"
    assert all((ROOT / file).exists() for file in [*ELSEWHERE.values(), *BY_TESTS.values()])


def test_figures_are_those_of_their_pages() -> None:
    """Each row of the page of benchmarks: its numbers and its script are on the page that it links."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "internals" / "benchmarks.md").read_text().splitlines()
        if line.startswith("| ") and "`benchmarks/" in line
    ]
    assert len(rows) >= 25
    named = set()
    for figure, value, script, date, machine in rows:
        (target,) = re.findall(r"\(([\w-]+\.md)#", figure)
        text = (ROOT / "docs" / "internals" / target).read_text()
        (name,) = re.findall(r"`benchmarks/(\w+)\.py`", script)
        named.add(name)
        assert (ROOT / "benchmarks" / f"{name}.py").exists()
        assert f"benchmarks/{name}" in text or f"benchmarks.{name}" in text, (figure, target)
        absent = [number for number in re.findall(r"\d+\.\d+|\d+", value) if number not in text]
        assert not absent, f"{figure}: {absent} not in {target}"
        assert machine in ("idle", "busy", "two cores")
        assert date == "not recorded" or date in re.sub(r"\s+", " ", text), f"{figure}: {date} not in {target}"
    unnamed = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - named
    assert unnamed == {"gpu", "gpu_capture", "gpu_engine", "optimizer_step", "commands"}, (
        "the last sentence of the page names these"
    )


def test_chapters_share_their_model() -> None:
    """The first block is one text in all chapters."""
    assert len(CHAPTERS) == 5 and len({blocks(chapter)[0] for chapter in CHAPTERS}) == 1


@pytest.mark.slow
def test_the_first_script_in_one_process_and_on_four_ranks(tmp_path: Path) -> None:
    """What the page Start says: the last line is the same, on every mesh. And the script of the README."""
    for page in ("docs/index.md", "README.md"):
        printed = set()
        for mesh, launcher in (("dp=-1,tp=1", []), ("dp=-1,tp=1", [4]), ("dp=2,tp=2", [4])):
            script = tmp_path / "first.py"
            script.write_text("\n".join(blocks(ROOT / page)).replace("dp=-1,tp=1", mesh))
            run = [sys.executable]
            run += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"] if launcher else []
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*run, str(script)], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            printed |= set(re.findall(r"loss [\d.]+", done.stdout))
        losses = [float(line.split()[1]) for line in printed]
        assert losses and max(losses) - min(losses) < 3e-6, page


def cells(page: str) -> list[str]:
    """The code in the last column of the page's tables."""
    found = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            last = re.split(r"(?<!\\)\|", line)[-2]
            found += [code.replace("\\|", "|") for code in re.findall(r"`([^`]+)`", last)]
    return found


SECTIONS = ("units", "precision", "checkpoint", "attention", "pipeline", "local")


def as_plan(code: str) -> str | None:
    """A plan in YAML with the entry of a cell; None for other code."""
    if code.startswith(tuple(f"{section}:" for section in SECTIONS)):
        section, _, rest = code.partition(": ")
        return f"{section}: {rest.replace('path: ...', 'path: layers')}\nshard: {{}}"
    if re.match(r"^[^ ]+: \{\w+: ", code) or code.startswith("'.*': {"):
        path, _, rest = code.partition(": {")
        path = path.strip("'")
        prefix = "layer." if path in ("weight",) or path.startswith("<") else ""
        return f"shard: {{'{prefix}{path}': {{{rest}}}"
    return None


@pytest.mark.parametrize("page", ["coming-from.md", "choose.md", "from-torchtitan.md"])
def test_entries_in_tables_are_entries_of_plans(page: str) -> None:
    texts = [text for code in cells(page) if (text := as_plan(code)) is not None]
    assert len(texts) >= {"coming-from.md": 12, "choose.md": 3, "from-torchtitan.md": 7}[page]
    for text in texts:
        whole = f"version: 1\nmesh: {{pp: 2, dp: 2, cp: 2, tp: 2, ep: 2}}\n{text}\n"
        try:
            plan = Plan.from_yaml(whole, None)
        except Exception as error:
            raise AssertionError(f"{text}: {error}") from error
        assert len(plan) or plan.pipeline_entry is not None, text


def test_yaml_in_pages_is_a_plan() -> None:
    """Or a part of one."""
    count = 0
    for page in (ROOT / "docs").glob("*.md"):
        for text in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            sections = {"version": "1", "mesh": "{pp: 2, dp: 2, cp: 2, tp: 2, ep: 2}", "shard": "{}"}
            missing = [
                f"{name}: {value}" for name, value in sections.items() if not re.search(rf"^{name}:", text, re.M)
            ]
            Plan.from_yaml(
                "\n".join([*missing, text]),
                None if "mesh" in "".join(missing) else {"dp": 2, "tp": 2, "fsdp": 2, "ep": 2},
            )
            count += 1
    assert count >= 5


@pytest.mark.parametrize("page", ["coming-from.md", "choose.md", "from-torchtitan.md"])
def test_names_in_tables_exist(page: str) -> None:
    count = 0
    for code in cells(page):
        for dotted in re.findall(r"\bvescale((?:\.\w+)+)", code):
            assert pkgutil.resolve_name(f"vescale{dotted}") is not None  # raises for a name that is not there
            count += 1
        command = re.match(r"vescale (\w+)", code)
        if command:
            assert command[1] in COMMANDS, code
        if as_plan(code) is None and "(" in code and not code.startswith(("vescale zoo", "accelerate", "torchrun")):
            for statement in code.split("; "):
                ast.parse(statement + (" pass" if statement.endswith(":") else ""))
    assert count >= {"coming-from.md": 8, "choose.md": 0, "from-torchtitan.md": 7}[page]


def commands(text: str) -> list[str]:
    """Lines for a shell that call ``vescale``, in blocks for it; without comments and optional parts."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shell = [block for language, block in fenced if language in ("", "bash")]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    calls = [re.sub(r" +#.*$| \[[^\]]*\]| > \S+$", "", line) for line in lines if line.startswith("vescale ")]
    return [call for call in calls if not call.startswith("vescale: ")]


def test_commands_in_pages_have_these_arguments() -> None:
    called = set()
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.md")]:
        for call in commands(page.read_text()):
            _, name, *rest = shlex.split(call)
            parser = argparse.ArgumentParser(prog=f"{page.name}: {call}", exit_on_error=False)
            importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
            try:
                parser.parse_args(rest)
            except (SystemExit, argparse.ArgumentError) as error:
                raise AssertionError(f"{page.name}: {call}: {error}") from None
            called.add(name)
    assert called >= {"ckpt", "search", "plan", "lint", "explain", "verify", "estimate", "diff", "simulate"}


def test_links_between_pages_lead_somewhere() -> None:
    """Also in plain text, on GitHub: files and headings."""
    wrong = []
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://")):
                continue
            name, _, heading = target.partition("#")
            file = page.parent / name if name else page
            if not file.exists():
                wrong.append(f"{page.name}: {target}")
            elif heading and heading not in headings(file):
                wrong.append(f"{page.name}: {target} (headings: {sorted(headings(file))})")
    assert not wrong, "\n".join(wrong)


# A placement of a certain tensor, as a Python class with arguments; and meshes with blanks between their axes.
OTHER_NOTATION = re.compile(
    r"`[^`]*\b(?:Partial|Replicate|Shard)\([^`)]*\)? ?->[^`]*`"
    r"|`(?:Shard|Partial|InterleavedShard)\([^`)]+\)`|`Replicate\(\)`"
    r"|\b(?:dp|tp|cp|pp|ep|fsdp) ?= ?\d+(?:, | x )(?:dp|tp|cp|pp|ep|fsdp) ?= ?\d+"
)


def other_notation(name: str, text: str) -> list[str]:
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"In Python these are[\s\S]*?Several|^\| text \| meaning \| in Python \|\n(\|.*\n)*",
        "",
        text,
        flags=re.MULTILINE,
    )
    return [f"{name}: {found}" for found in OTHER_NOTATION.findall(text)]


def test_cuts_are_written_in_one_notation() -> None:
    """That of plans, which the glossary explains; PyTorch's classes in blocks of Python alone."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"]
    wrong = [found for page in pages for found in other_notation(page.name, page.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("text", ["an `Shard(0)` DTensor", "on dp=2, tp=2", "dp=2 x tp=2", "`Shard(0) -> Replicate()`"])
def test_other_notations_are_seen(text: str) -> None:
    assert other_notation("a.md", text)
    assert not other_notation("a.md", "an `S(0)` DTensor on `dp=2,tp=2`, `P -> R`; `Shard` is a class")


def headings(file: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "internals"]
    assert "/internals/" in text.partition("not_in_nav:")[2]
    assert not [page.name for page in pages if page.name not in text]


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    # Without --quiet: it hides warnings from --strict, too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "index.html").exists()
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] in (tmp_path / "site" / "plans" / "index.html").read_text()
    searched = {
        entry["location"].split("/")[0]
        for entry in json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    }
    assert "plans" in searched and "api" in searched and "internals" not in searched
    shutil.rmtree(tmp_path / "site")


def stock_pytorch() -> tuple[bool, str]:
    """Whether dropout of a sharded DTensor has one device's bits, and the error of clipping over two meshes."""
    uninstall()
    torch.manual_seed(0)
    expected = nn.functional.dropout(torch.ones(64), 0.5)
    torch.manual_seed(0)
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "ep")]
    whole = distribute_tensor(torch.ones(64), meshes[0], [Shard(0)])
    found = nn.functional.dropout(whole, 0.5).full_tensor()
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for mesh in meshes]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    try:
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return torch.equal(found, expected), text


def test_what_the_readme_says_of_pytorch(ranks: RankPools) -> None:
    for equal, text in ranks.run(stock_pytorch, world_size=2):
        assert not equal
        assert "mesh" in text


USERS = [*sorted((ROOT / "docs").glob("*.md")), *CHAPTERS]


def test_users_pages_are_short_and_timeless() -> None:
    """No dates, machines, goals and names of tests or benchmarks; they are on pages for contributors."""
    words = {page: sum(1 for word in page.read_text().split() if re.search(r"\w", word)) for page in USERS}
    del words[ROOT / "docs" / "errors.md"]  # generated
    assert sum(words.values()) <= 42_000
    found = []
    for page in USERS:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            text = re.sub(r"\([^)]*\)", "", line)  # links
            if re.search(r"\b20[12]\d\b(?! ?\.)|\btests/|\bbenchmarks[/.]\w|\b(busy|idle) machine|\(goal", text):
                found.append(f"{page.name}:{number}: {line}")
    assert not found, "\n".join(found)


def test_tables_have_a_line_below_their_head() -> None:
    """Any other is shown as text with bars."""
    found = []
    for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
        lines = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S).split(
            "\n"
        )
        for number, (above, head, below) in enumerate(zip(["", *lines], lines, [*lines[1:], ""]), 1):
            if head.startswith("|") and not above.startswith("|") and not re.fullmatch(r"[|: -]+", below):
                found.append(f"{page.name}:{number}: {head}")
    assert not found, "\n".join(found)


def test_settings_are_those_of_the_code() -> None:
    sources = [*(ROOT / "vescale").rglob("*.py"), ROOT / "setup.py"]
    read = {name for path in sources for name in re.findall(r"VESCALE_[A-Z_]+", path.read_text())}
    assert set(re.findall(r"VESCALE_[A-Z_]+", (ROOT / "docs" / "settings.md").read_text())) == read


FIGURE = r"\d+\.\d+"


def test_figures_of_performance_are_on_the_pages_that_say_how() -> None:
    """Each number of a paragraph or table is on a page for contributors that the same section links."""
    text = (ROOT / "docs" / "performance.md").read_text()
    checked = 0
    for section in text.split("\n## ")[2:]:
        linked = re.findall(r"\(internals/([\w-]+\.md)#", section)
        known = "\n".join((ROOT / "docs" / "internals" / name).read_text() for name in linked)
        numbers = set(re.findall(FIGURE, re.sub(r"\([^)]*\)", "", section)))
        checked += len(numbers)
        absent = {number for number in numbers if number not in known} - DERIVED
        assert not absent, f"{section.splitlines()[0]}: {absent}"
    assert checked > 30


# Rounded, or the median of what the page lists.
DERIVED = {"0.47", "2.03", "1.06", "2.1"}
