"""The self-check names what a torch version lacks, and its table is complete."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale import compat
from vescale.compat import UnsupportedTorchError, self_check
from vescale.compat.needs import NEEDS, Need

FOLDER = Path(compat.__file__).parent


def test_this_torch_has_everything() -> None:
    self_check()


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.module}.{need.path}")
def test_a_missing_name_is_named(need: Need, monkeypatch: pytest.MonkeyPatch) -> None:
    parent: Any = importlib.import_module(need.module)
    for alternative in need.path.split("|"):
        *outer, last = alternative.split(".")
        owner = parent
        for part in outer:
            owner = getattr(owner, part)
        for holder in (owner, type(owner), *getattr(owner, "__mro__", ())):  # an instance, its class, or a base
            if last in getattr(holder, "__dict__", {}):
                monkeypatch.delattr(holder, last)
    with pytest.raises(UnsupportedTorchError) as caught:
        self_check()
    assert need.path in str(caught.value) and need.module in str(caught.value)
    assert torch.__version__ in str(caught.value)


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
    from vescale.compat import install as module_function

    module = importlib.import_module("vescale.compat.install")
    monkeypatch.setattr(module, "_INSTALLED", [])
    monkeypatch.setattr("vescale.compat.needs.NEEDS", (Need("torch", "gone"),))
    with pytest.raises(UnsupportedTorchError):
        module_function(None)  # type: ignore[arg-type]
    assert module._INSTALLED == []


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


def test_every_private_import_is_checked() -> None:
    known = {(need.module, need.path.split(".")[0]) for need in NEEDS} | {
        (need.module.rpartition(".")[0], need.module.rpartition(".")[2]) for need in NEEDS
    }
    assert private_imports() <= known, sorted(private_imports() - known)
