"""What a module returns: ``<out:i>`` entries place only the item that they name, and the model's losses are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale import Plan, lower
from vescale.errors import EntryError
from vescale.runtime import install


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Record:
    first: torch.Tensor
    second: torch.Tensor


RETURNS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "named tuple": Pair,
    "dataclass": Record,
    "mapping": lambda a, b: {"first": a, "second": b},
    "tensor": lambda a, b: a,
}


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.returned = RETURNS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(x + 1, x * 2)


def items_of(output: Any) -> list[Any]:
    if isinstance(output, torch.Tensor):
        return [output]
    return list(
        output if isinstance(output, tuple | list) else (output if isinstance(output, dict) else vars(output)).values()
    )


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "entry", "expected"),
    [
        ("tuple", "1", {1}),
        ("tuple", "0", {0}),
        ("list", "1", {1}),
        ("named tuple", "1", {1}),
        ("mapping", "second", {1}),
        ("mapping", "0", {0}),
        ("tensor", "0", {0}),
        ("tensor", "1", set()),
        ("tuple", "2", set()),
        ("tuple", "first", set()),
        ("mapping", "third", set()),
        ("mapping", "2", set()),
        ("named tuple", "second", {1}),
        ("dataclass", "second", {1}),
        ("dataclass", "third", set()),
    ],
)
def test_one_item_is_placed(two_ranks: None, kind: str, entry: str, expected: set[int]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = Plan(mesh).shard("<in:0>", {"tp": Replicate()}).shard(f"0.<out:{entry}>", {"tp": Shard(0)})
    model = nn.Sequential(Inner(kind))
    install(model, lower(plan, model), mesh)
    if not expected:
        with pytest.raises(EntryError, match=f"0.<out:{entry}>.*matches nothing"):
            model(torch.arange(4.0))
        return
    found = model(torch.arange(4.0))
    assert type(found) is type(RETURNS[kind](torch.ones(1), torch.ones(1))) or kind == "tensor"
    items = items_of(found)
    assert all(isinstance(item, DTensor) for item in items)
    assert {index for index, item in enumerate(items) if item.placements == (Shard(0),)} == expected
    values = [torch.arange(4.0) + 1, torch.arange(4.0) * 2]
    for index, item in enumerate(items):
        assert torch.equal(item.to_local(), values[index][:2] if index in expected else values[index])


class Loss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.returned = RETURNS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(x.sum(), x * 2)


@pytest.mark.parametrize("kind", RETURNS)
def test_a_loss_is_reduced_wherever_it_is(two_ranks: None, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Loss(kind)
    install(model, lower(Plan(mesh).shard("<in>", {"tp": Shard(0)}), model), mesh)
    found = model(torch.arange(4.0))
    items = items_of(found)
    assert [item.placements for item in items] == [(Replicate(),), (Shard(0),)][: len(items)]
