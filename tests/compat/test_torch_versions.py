"""Which versions of torch are promised what, and what happens on others."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.fresh import run_fresh
from vescale import compat
from vescale.compat import needs, self_check
from vescale.errors import LIMITED_TORCH, SUPPORTED_TORCH, TORCH_RANGE, UnsupportedTorchError, torch_promise

ROOT = Path(__file__).parents[2]
UNKNOWN = ["2.10.0", "2.16.0", "3.13.0", "2.1.3", "2.16.0.dev20261128+cpu", "2.15.0a0+git123", "2.15.0rc1", "git"]


@pytest.mark.parametrize("version", UNKNOWN)
def test_other_versions_and_previews_are_not_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_promise(version) == "not supported"
    monkeypatch.delenv("VESCALE_ALLOW_TORCH", raising=False)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsupportedTorchError) as caught:
        self_check()
    text = str(caught.value)
    for part in (
        f"found torch {version}",
        *SUPPORTED_TORCH,
        *LIMITED_TORCH,
        'pip install "torch>=',
        "VESCALE_ALLOW_TORCH=1",
    ):
        assert part in text


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.13.1.post1"])
def test_supported_versions(version: str) -> None:
    assert torch_promise(version) == "supported"


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu"])
def test_limited_versions(version: str) -> None:
    assert torch_promise(version).startswith("limited: ")


def test_this_torch_is_one_of_them() -> None:
    assert torch_promise(torch.__version__) != "not supported"


def test_pages_and_package_say_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch{TORCH_RANGE}" in project["dependencies"]
    first, last = LIMITED_TORCH[0], SUPPORTED_TORCH[-1]
    major, minor = last.split(".")
    assert f">={first},<{major}.{int(minor) + 1}" == TORCH_RANGE
    minors = [int(version.split(".")[1]) for version in (*LIMITED_TORCH, *SUPPORTED_TORCH)]
    assert minors == list(range(minors[0], minors[0] + 5))
    readme, start = (ROOT / "README.md").read_text(), (ROOT / "docs" / "index.md").read_text()
    versions = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"| {', '.join(SUPPORTED_TORCH)} | supported: " in versions
    assert f"| {', '.join(LIMITED_TORCH)} | limited: " in versions
    for page in (readme, start):
        assert set(re.findall(r"torch(>=[\d.]+,<[\d.]+)", page)) == {TORCH_RANGE}
    assert (
        f"{', '.join(SUPPORTED_TORCH[:-1])} and {last} are supported, {' and '.join(LIMITED_TORCH)} with limits"
        in start
    )


_FIRST_USES = """
import json, sys
import torch
torch.__version__ = sys.argv[1]
import vescale, vescale.cli
outcomes = {}
names = [f"vescale.{name}" for name in vescale.__all__]
names += ["vescale.checkpoint.Checkpointer", "vescale.checkpoint.save", "vescale.comm.record_comms"]
names += ["vescale.fsdp.fully_shard", "vescale.ops.register_rule"]
names += ["vescale.compat.install", "vescale.placements.RaggedShard", "vescale.rng.enable"]
for name in names:
    module, _, attribute = name.rpartition(".")
    try:
        getattr(__import__(module, fromlist=[attribute]), attribute)
        outcomes[name] = "vescale.compat.dtensor" in sys.modules
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print(json.dumps(outcomes))
"""


def test_the_first_use_raises_and_importing_vescale_does_not() -> None:
    """Whatever reaches private names of torch raises; the rest of the public names does not touch them."""
    done = run_fresh(_FIRST_USES, "2.16.0")
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    refused = {name for name, outcome in outcomes.items() if outcome is not False}
    for name in refused:
        assert str(outcomes[name]).startswith("UnsupportedTorchError: found torch 2.16.0, expected 2.13"), outcomes[
            name
        ]
    used = {"parallelize", "fully_shard", "RaggedShard", "deferred_init", "DBuffer", "GradientReducer", "init_mesh"}
    assert {f"vescale.{name}" for name in used} <= refused
    assert {"vescale.checkpoint.Checkpointer", "vescale.rng.enable", "vescale.comm.record_comms"} <= refused
    assert outcomes["vescale.__version__"] is False and outcomes["vescale.plan_layout"] is False


_AT_OWN_RISK = """
import os, sys, warnings
import torch
torch.__version__ = "2.16.0"
os.environ["VESCALE_ALLOW_TORCH"] = "1"
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import vescale
    vescale.RaggedShard((0,), (1, 1))
    vescale.rng.enable()
    vescale.compat.self_check()
assert vescale.compat.is_installed("random") and vescale.compat.is_installed("placements")
texts = [str(one.message) for one in told if type(one.message).__name__ == "UntestedTorchWarning"]
assert len(texts) == 1 and "\\n" not in texts[0], texts
print(texts[0])
"""


def test_a_variable_lets_it_go_on_and_says_so_once() -> None:
    done = run_fresh(_AT_OWN_RISK)
    assert done.returncode == 0, done.stderr
    assert "found torch 2.16.0" in done.stdout and TORCH_RANGE in done.stdout


def test_nothing_is_changed_on_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.uninstall()
    before = dict(vars(DTensor))
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.raises(UnsupportedTorchError):
        compat.install()
    assert not compat.is_installed() and dict(vars(DTensor)) == before
    monkeypatch.undo()
    compat.install()


def test_names_that_are_missing_are_missing_at_any_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "NEEDS", (needs.Need("torch", "gone"),))
    monkeypatch.setenv("VESCALE_ALLOW_TORCH", "1")
    with pytest.raises(UnsupportedTorchError, match=r"\n  torch\.gone\n"):
        self_check()


_ENVIRONMENT = """
import sys
import torch
torch.__version__ = sys.argv[1]
from vescale.cli import main
sys.exit(main(["env"]))
"""


@pytest.mark.parametrize(("version", "promise", "code"), [("2.16.0", "not supported", 1), ("2.12.0", "limited: ", 0)])
def test_the_command_tells_what_is_promised(version: str, promise: str, code: int) -> None:
    done = run_fresh(_ENVIRONMENT, version)
    assert re.search(rf"promise\s+{promise}", done.stdout), done.stdout + done.stderr
    assert done.returncode == code
    assert ("found torch 2.16.0" in done.stdout) == (code == 1)
