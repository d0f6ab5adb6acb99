"""An install from a clone: of a folder with any name, imported from any folder, by a user with any home."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What Python does at its start with a folder of installed packages, in a process without the install that runs the tests.
PRELUDE = """
import site, sys
from pathlib import Path
sys.path = [entry for entry in sys.path if entry == "" or not (Path(entry) / "vescale" / "__init__.py").exists()]
sys.meta_path = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
site.addsitedir(sys.argv.pop(1))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named ``vescale``, as ``git clone`` names it, whose path has what shells and patterns trip over."""
    folder = tmp_path_factory.mktemp("a user's [files] ü") / "vescale"
    folder.mkdir()
    without_builds = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "vescale", folder / "vescale", ignore=without_builds)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def install(clone: Path, kind: str, into: Path) -> Path:
    """What ``pip install --no-build-isolation`` does with the project's build backend, without its download and with no
    compiler; returns the folder of installed packages."""
    wheels = into / "wheels"
    wheels.mkdir()
    build = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(wheels)!r}))"
    environment = {**os.environ, "CC": "no-compiler", "CXX": "no-compiler"}
    done = subprocess.run([sys.executable, "-c", build], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    shutil.unpack_archive(wheel, into / "packages", "zip")
    return into / "packages"


def run(packages: Path, program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", PRELUDE + program, str(packages)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def check_wheel(folder: Path) -> None:
    """Its size, its licence, and what an index shows of it."""
    (wheel,) = (folder / "wheels").glob("*.whl")
    assert wheel.stat().st_size < 1.62e6  # without helpers, which a build for one torch adds
    assert not list((folder / "packages").rglob("*.cpp")), "sources without headers, which nothing reads"
    (information,) = (folder / "packages").glob("*.dist-info")
    assert (information / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    found = email.message_from_string((information / "METADATA").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["Name"] == project["name"] == "vescale-plan" and found["License-Expression"] == "Apache-2.0"
    assert found["Author"] and found["Keywords"] and found["License-File"] == "LICENSE"
    assert dict(line.split(", ") for line in found.get_all("Project-URL", [])) == project["urls"]
    assert set(found.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    text = str(found.get_payload())
    assert text.startswith("# vescale") and found["Description-Content-Type"] == "text/markdown"
    relative = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    assert not relative, "links that lead nowhere on an index"


def test_extras_install_what_the_examples_import() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {re.split(r"[>=]", line)[0] for name in ("hf", "diffusers", "examples") for line in extras[name]}
    imported = set()
    for path in (ROOT / "examples").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
    others = imported - set(sys.stdlib_module_names) - {"torch", "vescale", "before", "after"}
    assert others >= {"transformers", "peft", "lightning", "sklearn"}
    others.add("accelerate")  # by transformers.Trainer
    assert {name.replace("sklearn", "scikit-learn") for name in others} <= listed | {"numpy"}


def test_an_editable_install_is_found_from_any_folder(clone: Path, tmp_path: Path) -> None:
    """A clone's folder, seen from the folder above, is no package named vescale."""
    packages = install(clone, "editable", tmp_path)
    for folder in (clone.parent, clone, tmp_path):
        done = run(packages, "import vescale; print(vescale.__version__, vescale.__file__)", folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split(" ", 1)[1].strip() == str(clone / "vescale" / "__init__.py"), folder


def test_a_wheel_runs_the_first_script(clone: Path, tmp_path: Path) -> None:
    """Above the clone, by a user without a home, whose files are for nobody else, in another locale and time zone."""
    packages = install(clone, "wheel", tmp_path)
    check_wheel(tmp_path)
    text = (ROOT / "README.md").read_text()
    script = text[text.index("```python\n") + len("```python\n") :].partition("```")[0]
    unusual = {"HOME": str(tmp_path / "no home"), "TZ": "Pacific/Chatham", "LC_ALL": "C"}
    done = run(packages, "import os; os.umask(0o077)\n" + script, clone.parent, **unusual)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss "), done.stdout
