"""The self-check names what a torch version lacks, before anything is changed or imported."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.fresh import run_fresh
from vescale import compat, ops, rng
from vescale.compat import UnsupportedTorchError, self_check
from vescale.compat.needs import NEEDS, OPTIONAL, Need
from vescale.runtime._handlers import install_handlers

FOLDER = Path(compat.__file__).parent


def test_this_torch_has_everything() -> None:
    self_check()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import _dispatch

    def changed(local_tensor: Any, target_spec: Any, current_spec: Any, async_op: bool = False) -> None: ...

    monkeypatch.setattr(_dispatch, "redistribute_local_tensor", changed)
    with pytest.raises(
        UnsupportedTorchError, match=r"_dispatch\.redistribute_local_tensor: parameters local_tensor, cur"
    ):
        self_check()


def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale.compat.needs.NEEDS", (Need("torch.distributed.gone", "thing"),))
    with pytest.raises(UnsupportedTorchError, match=r"module torch\.distributed\.gone \(for thing\)"):
        self_check()


def test_nothing_is_installed_on_a_torch_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.uninstall()
    before = dict(vars(DTensor))
    monkeypatch.setattr("vescale.compat.needs.NEEDS", (Need("torch", "gone"),))
    for function in (compat.install, compat.extend_dtensor, rng.enable, install_handlers):
        with pytest.raises(UnsupportedTorchError):
            function()
    assert not compat.is_installed() and dict(vars(DTensor)) == before


def private_imports() -> set[tuple[str, str]]:
    """``(module, name)`` of every private torch name that compat imports."""
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                found |= {(node.module or "", alias.name) for alias in node.names}
    return {
        (module, name) for module, name in found if any(part.startswith("_") for part in (*module.split("."), name))
    }


_IMPORT_WITHOUT_EACH_NAME = """
import importlib, json, sys, types

import torch.distributed.checkpoint, torch.distributed.tensor

package = types.ModuleType("vescale")
package.__path__ = [sys.argv[1]]
outcomes = {}
for module, name in json.loads(sys.argv[2]):
    holder = importlib.import_module(module)
    kept = getattr(holder, name)
    delattr(holder, name)
    for loaded in [m for m in sys.modules if m.partition(".")[0] == "vescale"]:
        del sys.modules[loaded]
    sys.modules["vescale"] = package
    try:
        importlib.import_module("vescale.compat")
        outcomes[f"{module}.{name}"] = "imported"
    except Exception as error:
        outcomes[f"{module}.{name}"] = f"{type(error).__name__}: {error}"
    setattr(holder, name, kept)
print(json.dumps(outcomes))
"""


def test_the_import_names_what_is_missing() -> None:
    """On a torch without a private name, importing the package says so; it is not the first import that fails."""
    names = [
        [module, name]
        for module, name in sorted(private_imports())
        if not isinstance(getattr(importlib.import_module(module), name), type(torch)) and module != "torch._C"
    ]
    assert len(names) > 15
    done = run_fresh(_IMPORT_WITHOUT_EACH_NAME, str(FOLDER.parent), json.dumps(names))
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == len(names)
    for name, outcome in outcomes.items():
        if outcome != "imported":
            assert outcome.startswith("UnsupportedTorchError: torch") and f"\n  {name}" in outcome, outcome
    optional = {f"{need.module}.{path.split('.')[0]}" for need in OPTIONAL for path in need.path.split("|")}
    optional -= {f"{need.module}.{need.path}" for need in NEEDS}
    imported = {name for name, outcome in outcomes.items() if outcome == "imported"}
    assert imported == optional & outcomes.keys(), imported ^ (optional & outcomes.keys())


def test_what_is_installed_passes_the_check_in_every_order() -> None:
    try:
        for order in itertools.permutations((ops.install, install_handlers, rng.enable)):
            compat.uninstall()
            for step in order:
                step()
                self_check()
    finally:
        compat.install()
