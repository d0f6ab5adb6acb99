"""The registry of op behaviour."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale.ops import OpEntry, entries, families, register, register_family
from vescale.ops import _registry as registry

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    yield


def test_every_file_of_a_family_is_imported() -> None:
    """A file that nobody imports registers nothing."""
    families = [path.stem for path in Path(registry.__file__).parent.glob("*.py") if not path.name.startswith("_")]
    assert [name for name in families if f"vescale.ops.{name}" not in sys.modules] == []


def test_fields_are_added_once() -> None:
    def rule(call: Any) -> None: ...

    op = aten.trace.default
    assert op not in entries()
    register(op, rule=rule)
    register(op, handler=rule, backward="custom")
    expected = OpEntry(rule=rule, handler=rule, backward="custom")
    assert entries()[op] == expected
    with pytest.raises(
        ValueError, match=r"aten\.trace\.default has rule already registered; each op belongs to one file"
    ):
        register(op, rule=rule)


def test_tables_do_not_change_while_they_are_read() -> None:
    """What one thread reads stays as it is when another one registers; nothing that threads register gets lost."""

    def rule(call: Any) -> None: ...

    before = entries()
    size, seen = len(before), 0
    for _ in before:
        if not seen:
            register(aten.tril_indices.default, rule=rule)
        seen += 1
    assert seen == size == len(before) and aten.tril_indices.default not in before
    assert aten.tril_indices.default in entries()

    op, num_threads, num_rules = aten.triu_indices.default, 4, 300
    together = threading.Barrier(num_threads)

    def registering() -> None:
        together.wait()
        for _ in range(num_rules):
            registry.register_user_rule(op, lambda call: None)

    before_switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=registering) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_switch)
    assert len(entries()[op].user_rules) == num_threads * num_rules


def test_the_order_of_rules() -> None:
    """Users' rules, the latest first; the overload's; that of all overloads; those of families."""

    def named(name: str) -> Any:
        def rule(call: Any) -> None: ...

        rule.__name__ = name
        return rule

    op = aten.mul.Tensor
    register(aten.mul, rule=named("all overloads"))
    register(op, rule=named("overload"))
    registry.register_user_rule(op, named("first"))
    registry.register_user_rule(op, named("second"))
    names = [rule.__name__ for rule in registry.rules_of(op)]
    assert names == ["second", "first", "overload", "all overloads", "elementwise_rule", "interleaved_rule"]
    assert next(rule.__name__ for rule in registry.rules_of(aten.mul.Scalar)) == "all overloads"


def test_families_have_an_order() -> None:
    assert tuple(family.name for family in families()) == registry.FAMILY_ORDER
    covering = [family.name for family in families() if family.covers(aten.native_dropout.default)]
    assert covering[0] == "random"
    for name, found in (("elementwise", "is already registered"), ("pointwise", "is not in FAMILY_ORDER")):
        with pytest.raises(ValueError, match=f"op family '{name}' {found}"):
            register_family(name, covers=lambda op: True, rule=lambda call: None)
