"""The file of the CI: it is read as the service reads it, and what it calls is there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import count_helpers
from vescale import csrc
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


OTHERS = [yaml.safe_load(FILE.with_name(name).read_text()) for name in ("publish.yml", "site.yml")]
RUNS = [
    step for workflow in (CI, *OTHERS) for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
]


def test_releases_are_of_the_version_and_of_no_placeholder() -> None:
    publish, site = OTHERS
    assert publish[True] == {"push": {"tags": ["v*"]}} and site[True]["push"] == {"branches": ["main"]}
    check = publish["jobs"]["build"]["steps"][2]["run"]
    version = re.search(r"\$\((sed .*)\)\"", check)
    assert version is not None
    found = subprocess.run(["bash", "-c", version[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", found.stdout)
    assert "! grep -n OWNER pyproject.toml" in check
    for name in ("bug", "request", "config"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert name == "config" or {"name", "description", "body"} <= set(form)


@pytest.mark.parametrize("step", RUNS, ids=lambda step: step["run"][:30])
def test_commands_are_shell(step: dict[str, Any]) -> None:
    expressions = re.findall(r"\$\{\{(.*?)\}\}", step["run"])
    assert all(KNOWN.search(expression) for expression in expressions)
    subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "x", step["run"])], check=True)


SUPPORTED = CI["jobs"]["test"]["strategy"]["matrix"]["torch"]


def test_helpers_are_counted_by_name() -> None:
    """All of them with a compiler, whose warnings are errors, and none without; also in each wheel."""
    test, wheel = CI["jobs"]["test"], CI["jobs"]["wheel"]
    (count,) = [step["run"] for step in test["steps"] if "count_helpers" in step.get("run", "")]
    assert count == ".venv/bin/python tools/count_helpers.py ${{ matrix.compiler && 'all' || 'none' }}"
    assert test["env"]["VESCALE_STRICT_BUILD"] == "${{ matrix.compiler && '1' || '' }}"
    assert wheel["env"] == {"VESCALE_STRICT_BUILD": "1"}


def test_a_wheel_is_built_and_tried_for_each_supported_torch() -> None:
    job = CI["jobs"]["wheel"]
    assert job["strategy"]["matrix"]["torch"] == SUPPORTED
    build, use = [step["run"] for step in job["steps"] if "run" in step]
    assert "torch==${{ matrix.torch }}" in build and "torch==${{ matrix.torch }}" in use
    assert "/tmp/build/" in build and "/tmp/build/" not in use and "cd /tmp" in use
    assert 'tools/count_helpers.py" all' in use and "first.py" in use
    script = re.search(r"awk '.*' README.md", use)
    assert script is not None
    text = subprocess.run(["bash", "-c", script[0]], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    compile(text, "README.md", "exec")
    assert text.startswith("import torch\n") and "vescale.parallelize(" in text


@pytest.mark.parametrize("kind", ["all", "none"])
def test_the_count_fails_unless_it_is_as_expected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(path.stem for path in (ROOT / "vescale" / "csrc").glob("*.cpp"))
    built, missing = dict.fromkeys(names, "built"), dict.fromkeys(names, "not built for torch 2.1")
    codes = []
    for states in (built, {**missing, names[3]: "built"}, {**built, names[0]: "not built"}, missing, {}):
        monkeypatch.setattr(csrc, "helper_states", lambda states=states: states)
        codes.append(count_helpers.main(kind))
    assert codes == ([0, 1, 1, 1, 1] if kind == "all" else [1, 1, 1, 0, 0])


def test_wheels_for_every_python_have_the_helpers_for_each_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = project["tool"]["cibuildwheel"]
    oldest = project["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert wheels["build"][0] == f"cp{oldest}-manylinux_*"
    rows = CI["jobs"]["test"]["strategy"]["matrix"]["include"]
    newer = [row["python"].replace(".", "") for row in rows if "python" in row]
    assert wheels["build"][1:] == [f"cp{python}-manylinux_*" for python in newer]
    for command in ("before-build", "test-command"):
        assert f"for torch in {' '.join(SUPPORTED)}; do pip install torch==$torch && " in wheels[command]
        subprocess.run(["bash", "-n", "-c", wheels[command]], check=True)
    assert wheels["build-frontend"] == {"name": "pip", "args": ["--no-build-isolation"]}
    assert "count_helpers.py all" in wheels["test-command"]
    linked = re.findall(r"--exclude lib(\w+).so", wheels["repair-wheel-command"])
    setup = (ROOT / "setup.py").read_text()
    assert sorted(linked) == sorted({*re.findall(r'"((?:c10|torch)\w*)"', setup)} - {"torch_version"})
