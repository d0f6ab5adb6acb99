"""The file of the CI: it is read as the service reads it, and what it calls is there."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from vescale.errors import LIMITED_TORCH, SUPPORTED_TORCH

ROOT = Path(__file__).parent.parent
FILE = ROOT / ".github" / "workflows" / "ci.yml"
CI: dict[Any, Any] = yaml.safe_load(FILE.read_text())
STEPS = [(name, step) for name, job in CI["jobs"].items() for step in job["steps"]]
# The contexts that may stand in ${{ }}, and what is read from them here.
KNOWN = re.compile(r"matrix\.(torch|compiler|python|tests)|github\.(ref|event_name|workflow)")


def test_jobs_have_what_the_service_demands() -> None:
    assert set(CI[True]) >= {"push", "pull_request", "schedule"}  # YAML 1.1 reads the key `on` as true
    for name, job in CI["jobs"].items():
        assert job["runs-on"] and job["steps"][0]["uses"].startswith("actions/checkout@"), name
    for name, step in STEPS:
        assert ("run" in step) != ("uses" in step), (name, step)


def test_the_matrix_covers_the_promised_versions() -> None:
    """The supported minor releases of torch with a compiler and without, and once on each newer Python; the two before them
    with the tests of what is promised there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = CI["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["compiler"] == [True, False]
    assert [version.rpartition(".")[0] for version in matrix["torch"]] == list(SUPPORTED_TORCH)
    limited = [row for row in matrix["include"] if "tests" in row]
    assert [row["torch"].rpartition(".")[0] for row in limited] == list(LIMITED_TORCH)
    for row in limited:
        assert {"tests/fsdp", "tests/rng", "tests/gradients"} <= set(row["tests"].split())
    pythons = {row["python"]: row["torch"] for row in matrix["include"] if "python" in row}
    assert pythons == dict(zip(["3.12", "3.13", "3.14"], matrix["torch"]))
    (default,) = re.findall(r"^TORCH \?= ([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert default == matrix["torch"][0]
    submissions = re.findall(r"TORCH=([\d.]+)", (ROOT / ".ci" / "run").read_text())
    assert submissions and set(submissions) <= set(matrix["torch"])
    declared = project["requires-python"].removeprefix(">=")
    used = {str(step["with"]["python-version"]) for _, step in STEPS if "setup-python" in step.get("uses", "")}
    assert any(declared in text for text in used)


def test_tomorrows_torch_is_tried_each_week() -> None:
    job = CI["jobs"]["ahead"]
    assert job["continue-on-error"] and job["env"] == {"VESCALE_ALLOW_TORCH": "1"}
    (weekly,) = [entry["cron"] for entry in CI[True]["schedule"] if entry["cron"].split()[-1] != "*"]
    assert weekly in job["if"] and job["steps"][-1]["run"] == "make test TORCH=nightly"
    assert "nightly" in re.search(r"^NIGHTLY := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1]  # type: ignore[index]


def test_commands_are_targets_of_the_makefile() -> None:
    text = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./-]+):", text, re.MULTILINE))
    used = {target for _, step in STEPS for target in re.findall(r"\bmake ([\w./-]+)", step.get("run", ""))}
    assert used == {"lint", "test", "test-all", "docs", ".venv/.ready"}
    assert used <= targets


@pytest.mark.parametrize("step", [step for _, step in STEPS if "run" in step], ids=lambda step: step["run"][:30])
def test_commands_are_shell(step: dict[str, Any]) -> None:
    expressions = re.findall(r"\$\{\{(.*?)\}\}", step["run"])
    assert all(KNOWN.search(expression) for expression in expressions)
    subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "x", step["run"])], check=True)


def test_wheels_are_built_for_the_oldest_python_and_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = project["tool"]["cibuildwheel"]
    oldest = project["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert wheels["build"][0] == f"cp{oldest}-manylinux_*"
    sources = {path.stem for path in (ROOT / "vescale" / "csrc").glob("*.cpp")}
    using_torch = ast.literal_eval(re.search(r"^USING_TORCH = (.*)$", (ROOT / "setup.py").read_text(), re.M)[1])  # type: ignore[index]
    tried = re.findall(r"'(\w+)'", wheels["test-command"])
    assert set(tried) == sources - using_torch
    subprocess.run(["bash", "-n", "-c", wheels["test-command"]], check=True)
