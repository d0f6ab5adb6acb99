"""Functions are replaced wherever modules hold them, found in C++ and in Python alike."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vescale import csrc
from vescale.compat.patching import Changes, rebind, undo


class Lazy(ModuleType):
    """A module as some libraries have them, with attributes that are not there yet."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize("way", [pytest.param("C++", marks=pytest.mark.helper("patching")), "Python"])
def test_functions_are_replaced_under_every_name(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "Python":
        monkeypatch.setattr(csrc, "load_module", lambda name: None)
    one, two, replacement = (lambda: 1), (lambda: 2), (lambda: 3)
    plain, lazy, no_module = ModuleType("plain"), Lazy("lazy"), SimpleNamespace(held=one)
    vars(plain).update(own=one, alias=one, other=two)
    vars(lazy).update(held=one, none=None, number=1)
    modules = {"plain": plain, "plain again": plain, "lazy": lazy, "no module": no_module, "not found": None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    before = [vars(module).copy() for module in (plain, lazy)]

    changes = Changes()
    changes.function(one, replacement)
    rebind(changes)
    found = [vars(plain)[name] for name in ("own", "alias", "other")]
    assert found == [replacement, replacement, two]
    assert vars(lazy)["held"] is replacement and vars(lazy)["number"] == 1
    assert no_module.held is one
    undo(changes)
    assert [vars(module) for module in (plain, lazy)] == before
