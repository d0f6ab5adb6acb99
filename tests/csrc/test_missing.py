"""Helpers that are missing, were built for another torch or cannot be loaded: what the user is told, and that it helps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiler import compiler
from tests.fresh import run_fresh
from vescale import csrc
from vescale.csrc._loader import rebuild_command
from vescale.csrc._names import USING_TORCH, file_name, helper_names

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
THIS = f"this is torch {torch.__version__} and Python {sys.version.split()[0]}"

# With the package in the folder argv[1]: all warnings, the helpers' states, and what static mode does.
PROGRAM = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.tensor import distribute_tensor, init_device_mesh
dist.init_process_group("fake", rank=int(sys.argv[2]), world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import vescale
    from vescale import csrc
    from vescale.errors import Coded
    assert vescale.__file__.startswith(sys.argv[1]), vescale.__file__
    before = len(caught)
    ragged = vescale.RaggedShard((0,), (3, 5))
    distribute_tensor(torch.randn(8, 3), mesh, [ragged], src_data_rank=None)
    for _ in range(2):
        model = vescale.parallelize(nn.Linear(4, 4), vescale.Plan(mesh))
        model(torch.randn(2, 4))
found = [f"{type(w.message).__name__}: {w.message}" for w in caught if isinstance(w.message, Coded)]
try:
    vescale.parallelize(nn.Linear(4, 4), vescale.Plan(mesh), mode="static")
    static = "runs"
except Exception as error:
    static = f"{type(error).__name__}: {error}"
print(json.dumps({"warnings": found, "at import": before, "states": csrc.helper_states(), "static": static}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without libraries, whose path needs quotes; ``setup.py`` makes it a clone."""
    root = tmp_path_factory.mktemp("a user's clone")
    shutil.copytree(ROOT / "vescale", root / "vescale", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def found(package: Path) -> Any:
    """Runs the program after the given files have been put among the libraries."""

    def run(libraries: dict[str, bytes], rank: int = 0) -> dict[str, Any]:
        paths = [package / "vescale" / "csrc" / name for name in libraries]
        for path, content in zip(paths, libraries.values()):
            path.write_bytes(content)
        try:
            done = run_fresh(PROGRAM, str(package), str(rank))
        finally:
            for path in paths:
                path.unlink()
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VESCALE_NO_NATIVE", "VESCALE_DISPATCH", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_helpers_of_another_torch(found: Any, package: Path) -> None:
    other = {file_name(name, "2.1.0", SUFFIX): b"" for name in USING_TORCH}
    result = found(other)
    (warning,) = result["warnings"]  # of three uses
    assert result["at import"] == 0
    all_names, their_names = helper_names(), ", ".join(sorted(USING_TORCH))
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    why = f"{their_names}: built for torch 2.1.0 and {version}; {THIS}"
    edit = f"Build them with a C++ compiler: {rebuild_command(package)}"
    assert warning.startswith(f"MissingHelpersWarning: {len(all_names)} of {len(all_names)} C++ helpers are missing")
    for part in ("an op takes 3 to 5 times the host time", why, edit, "VESCALE_NO_NATIVE=1", "[VS1104]"):
        assert part in warning, part
    assert result["static"].startswith("StaticHelpersError: mode='static' needs the C++ helpers; ")
    for part in (why, edit, "leave out mode=", "[VS1104]"):
        assert part in result["static"], part


def test_helpers_that_were_not_built(found: Any) -> None:
    result = found({})
    (warning,) = result["warnings"]
    assert f"{', '.join(helper_names())}: not built for torch {torch.__version__} and Python" in warning
    assert "StaticHelpersError" in result["static"]


def test_helpers_that_cannot_be_loaded(found: Any) -> None:
    """Each file is there, for this torch and this Python: built for another machine, or cut off."""
    result = found({file_name(name, torch.__version__, SUFFIX): b"no library" for name in helper_names()})
    assert set(result["states"]) == set(helper_names())
    assert all("cannot be loaded: " in state for state in result["states"].values()), result["states"]
    (warning,) = result["warnings"]
    assert "cannot be loaded: " in warning and "not built" not in warning
    assert "StaticHelpersError" in result["static"] and "cannot be loaded" in result["static"]


def test_other_ranks_say_nothing(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = found({}, rank=1)
    assert not result["warnings"] and "StaticHelpersError" in result["static"]


@pytest.mark.parametrize("setting", ["VESCALE_NO_NATIVE=1", "VESCALE_DISPATCH=stock"])
def test_what_was_switched_off_is_not_missing(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the libraries of this tree, as far as they are built."""
    monkeypatch.setenv(*setting.split("="))
    if setting.startswith("VESCALE_DISPATCH") and csrc.load("dispatch") is None:
        pytest.skip("optional accelerator vescale/csrc/dispatch.cpp: not built here, so that it is missing")
    done = run_fresh(PROGRAM, str(ROOT), "0")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["warnings"]
    assert result["static"].startswith(f"StaticHelpersError: mode='static' needs the C++ helpers; {setting} switched")


@pytest.mark.helper("dispatch")
def test_nothing_is_missing_where_all_are_built() -> None:
    done = run_fresh(PROGRAM, str(ROOT), "0")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["warnings"], result["static"], set(result["states"].values())) == ([], "runs", {"built"})


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler, so that nothing is to be built")
def test_the_command_builds_what_is_missing(package: Path, tmp_path: Path) -> None:
    """In a clone with one helper, so that it takes seconds."""
    clone = tmp_path / "it's a clone"
    shutil.copytree(package, clone)
    for source in (clone / "vescale" / "csrc").glob("*.cpp"):
        if source.stem != "mt19937":
            source.unlink()
    done = subprocess.run(["bash", "-c", rebuild_command(clone)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    look = "import sys; sys.path.insert(0, sys.argv[1]); from vescale import csrc; print(csrc.helper_states())"
    assert "'mt19937': 'built'" in run_fresh(look, str(clone)).stdout


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        ({"url": "file:///home/a%20b/vescale", "dir_info": {}}, "file:///home/a%20b/vescale"),
        (
            {"url": "https://example.org/vescale.git", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}},
            "git+https://example.org/vescale.git@0123abc",
        ),
        ({"url": "file:///tmp/vescale-0.1.0.tar.gz", "archive_info": {}}, "file:///tmp/vescale-0.1.0.tar.gz"),
        ({"url": "file:///tmp/vescale-0.1.0-cp311-linux_x86_64.whl", "archive_info": {}}, "FOLDER-OF-A-CLONE"),
        (None, "FOLDER-OF-A-CLONE"),
    ],
    ids=["folder", "git", "sdist", "wheel", "index"],
)
def test_the_command_after_an_install(direct_url: Any, source: str, tmp_path: Path) -> None:
    """The package without its sources: what pip installed it from is built again, against this torch."""
    info = tmp_path / "vescale_plan-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vescale-plan\nVersion: 0.1.0\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    command = rebuild_command(tmp_path)
    assert command.endswith(f"--no-build-isolation --no-deps --no-cache-dir --force-reinstall {source}")
    assert command.startswith(f"{sys.executable} -m pip install")
