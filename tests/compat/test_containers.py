"""Tensors inside what modules take and return."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from vescale.compat import map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = dataclasses.field(default=3, init=False)


@dataclasses.dataclass(eq=False)
class Layer(nn.Module):
    """A module that is a dataclass: it has an identity."""

    weight: Any

    def __post_init__(self) -> None:
        super().__init__()


class Strict(dict[str, Any]):
    """Cannot be made from its items."""

    def __init__(self, config: str, **items: Any) -> None:
        super().__init__(**items)
        self.config = config


CONTAINERS: list[Any] = [
    [ONE, TWO],
    (ONE, 3, None, TWO),
    Pair(ONE, TWO),
    {"a": ONE, "b": [TWO, "text"]},
    OrderedDict(b=ONE, a=TWO),
    defaultdict(list, a=ONE, b=TWO),
    MappingProxyType({"a": ONE, "b": TWO}),
    Strict("c", a=ONE, b=TWO),
    Frozen((ONE, {"x": TWO})),
    BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO,)),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_every_container_is_visited_and_keeps_its_type(value: Any) -> None:
    assert [tensor.item() for tensor in tensors_in(value)] == [1.0, 2.0]
    changed = map_tensors(lambda tensor: tensor + 10, value)
    assert type(changed) is type(value)
    assert [tensor.item() for tensor in tensors_in(changed)] == [11.0, 12.0]
    assert [tensor.item() for tensor in tensors_in(value)] == [1.0, 2.0]  # the original is not written to
    assert map_tensors(lambda tensor: tensor, value) is value


def test_attributes_and_order_survive() -> None:
    strict = map_tensors(lambda tensor: -tensor, Strict("c", b=ONE, a=TWO, n=1))
    assert strict.config == "c" and list(strict) == ["b", "a", "n"] and strict["n"] == 1
    assert map_tensors(lambda tensor: -tensor, defaultdict(list, a=ONE)).default_factory is list
    output = map_tensors(lambda tensor: -tensor, BaseModelOutput(last_hidden_state=ONE))
    assert output.last_hidden_state.item() == output["last_hidden_state"].item() == -1.0


def test_objects_with_an_identity_are_left_alone() -> None:
    for value in (Layer(ONE), Layer, Frozen, object(), "text", {ONE}, iter([ONE])):
        assert map_tensors(lambda tensor: -tensor, value) is value
        assert list(tensors_in(value)) == []
