"""What a module takes and returns: ``<out:i>`` entries place only the item that they name, tensors without dims are
Replicate where an entry shards a dim, and the model's losses are reduced."""

from __future__ import annotations

import itertools
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

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from tests.runtime.compare import assert_same_gradients, pair
from tests.whole import whole
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
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
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
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    model = Loss(kind)
    install(model, lower(Plan(mesh).shard("<in>", {"tp": Shard(0)}), model), mesh)
    found = model(torch.arange(4.0))
    items = items_of(found)
    assert [item.placements for item in items] == [(Replicate(),), (Shard(0),)][: len(items)]


class Timed(nn.Module):
    """As a diffusion model, which takes the time of all rows or of each; its blocks pass both on, and it returns a loss."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, time = given
            return self.linear(x) * time.view(-1, 1), time + 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Timed.Block() for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
        given = x, time
        for block in self.blocks:
            given = block(given)
        return {"out": given[0], "loss": given[0].square().mean()}


def the_model(plan: Plan) -> None:
    plan.shard("<in:(x|time)>", Shard(0), mesh="axis").shard("<out>", Shard(0), mesh="axis")


def its_blocks(plan: Plan) -> None:
    plan.shard(r"blocks\.\d+.<in>", Shard(0), mesh="axis").shard(r"blocks\.\d+.<out>", Shard(0), mesh="axis")


def its_parts(plan: Plan) -> None:
    plan.shard("<in:(x|time)>", Shard(0), mesh="axis", given="local")


def timed_step(entries: Callable[[Plan], None], times: list[Any]) -> None:
    reference, model = pair(Timed, entries, {"axis": 2})
    x = torch.arange(16.0).view(4, 4).double() / 16
    for time in map(torch.tensor, times):  # as entries see them one after the other: a scalar, rows, a scalar
        inputs = x, time.double()
        given = inputs
        if entries is its_parts:
            given = tuple(part.chunk(2)[dist.get_rank()] if part.ndim else part for part in inputs)
        model.zero_grad(), reference.zero_grad()
        expected, found = reference(*inputs), model(*given)
        torch.testing.assert_close(whole(found["out"]), expected["out"])
        for output in (expected, found):
            (output["loss"] + output["out"].sin().mean()).backward()
        assert_same_gradients(reference, model)


def test_tensors_without_dims(ranks: RankPools) -> None:
    times: list[list[Any]] = [[2.0, [1.0, 2.0, 3.0, 4.0], 3.0], [[1.0, 2.0, 3.0, 4.0], 2.0]]
    cases = list(itertools.product((the_model, its_blocks, its_parts), times))
    assert ranks.run(run_cases, timed_step, cases, world_size=2) == [len(cases)] * 2
