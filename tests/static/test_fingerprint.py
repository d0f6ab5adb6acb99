"""Fingerprints of modules are the same in all processes."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale.static._fingerprint import state_digest


class Configuration:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def digest(**attributes: Any) -> str:
    module = nn.Module()
    module.config = Configuration(**attributes)  # type: ignore[assignment]
    return state_digest(module, {})


def test_attributes_that_a_process_orders_and_hashes_by_itself() -> None:
    one = digest(size=3, name="a", _own_hash=5)  # as Hugging Face's GenerationConfig has it
    assert digest(name="a", size=3, _own_hash=-7) == one
    assert digest(name="b", size=3, _own_hash=5) != one
    assert digest(name="a", size=3, kind=1, _own_hash=5) != one
