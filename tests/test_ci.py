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


def test_the_matrix_covers_the_declared_versions() -> None:
    """Each supported torch, with a compiler and without, and what is promised on the limited ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = CI["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["compiler"] == [True, False]
    assert matrix["torch"] == [f"torch=={version}.*" for version in SUPPORTED_TORCH]
    limited = [row["torch"] for row in matrix["include"] if "tests" in row]
    assert limited == [f"torch=={version}.*" for version in LIMITED_TORCH]
    (pinned,) = re.findall(r"^TORCH := torch==(\d+\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"torch=={pinned}.*" in matrix["torch"]
    oldest = project["requires-python"].removeprefix(">=")
    pythons = {str(step["with"]["python-version"]) for _, step in STEPS if "setup-python" in step.get("uses", "")}
    assert any(oldest in text for text in pythons)


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
