"""Sparse matrices in a model (the adjacency of a graph), and sparse gradients of tables, against one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.device import on_cpu
from tests.ranks import RankPools, error_of, run_cases
from tests.runtime.compare import assert_same_step, pair
from tests.runtime.zero import sharded_at_rest
from vescale.plans import Plan

Tensor = torch.Tensor

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "spmm": torch.spmm,
    "mm": torch.mm,
    "operator": lambda adjacency, x: adjacency @ x,
    "method": lambda adjacency, x: adjacency.matmul(x),
}


class Graph(nn.Module):
    def __init__(self, product: str, held: Tensor | None = None) -> None:
        super().__init__()
        self.product, self.table = product, nn.Embedding(9, 4, sparse=True)
        self.register_buffer("held", held)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        product, adjacency = PRODUCTS[self.product], adjacency if self.held is None else self.held
        return product(adjacency, self.down(torch.tanh(product(adjacency, self.up(self.table(x))))))


def whole(plan: Plan) -> None:
    pass


def rows(plan: Plan) -> None:
    plan.shard("<in:x>", Shard(0), mesh="axis")


def columns(plan: Plan) -> None:
    plan.shard("up.<in>", Replicate(), mesh="axis").shard("up.(weight|bias)", Shard(0), mesh="axis")
    plan.shard("down.weight", Shard(1), mesh="axis").shard("table.weight", Shard(0), mesh="axis")


def zero(plan: Plan) -> None:
    sharded_at_rest(plan, axis="axis")


@on_cpu()  # the simulated device has no sparse matrices
def same_step(product: str, entries: Callable[[Plan], None], layout: torch.layout, is_held: bool = False) -> None:
    adjacency = (torch.eye(6).double() + torch.diag(torch.linspace(1, 2, 5).double(), 1)).to_sparse(layout=layout)
    held = adjacency if is_held else None
    reference, model = pair(lambda: Graph(product, held), entries, {"axis": 2}, strict=False)
    x = torch.tensor([1, 2, 3, 1, 5, 8])
    reference.table.sparse = False  # those of DTensors are dense
    assert_same_step(reference, model, x, adjacency, max_implicit=100)


def test_products_with_a_sparse_matrix(ranks: RankPools) -> None:
    layouts = torch.sparse_coo, torch.sparse_csr
    cases: list[Any] = list(itertools.product(PRODUCTS, (whole, rows, columns, zero), layouts))
    cases += itertools.product(PRODUCTS, (whole, rows, columns, zero), (torch.sparse_coo,), (True,))
    assert ranks.run(run_cases, same_step, cases, world_size=2) == [len(cases)] * 2


def cut_sparse() -> None:
    _, model = pair(lambda: Graph("mm"), lambda plan: plan.shard("<in:adjacency>", Shard(0), mesh="axis"), {"axis": 2})
    model(torch.tensor([0] * 6), torch.eye(6).double().to_sparse())


def cut_buffer() -> None:
    held = torch.eye(6).double().to_sparse()
    pair(lambda: Graph("mm", held), lambda plan: plan.shard("held", Shard(0), mesh="axis"), {"axis": 2})


def add_sparse() -> None:
    PRODUCTS["sum"] = lambda adjacency, x: x + adjacency
    _, model = pair(lambda: Graph("sum"), whole, {"axis": 2})
    model(torch.tensor([0] * 8), torch.eye(8).double().to_sparse())


class Made(nn.Module):
    """Makes a matrix of a few values of a parameter."""

    def __init__(self, is_dense: bool) -> None:
        super().__init__()
        self.is_dense, self.values = is_dense, nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.tensor([[0, 1, 1], [1, 0, 0]])
        if self.is_dense:
            return x.new_zeros((2, 4)).index_put((rows, columns), self.values, accumulate=True) @ x
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), self.values, (2, 4)) @ x


def make_sparse() -> None:
    _, model = pair(lambda: Made(False), whole, {"axis": 2})
    model(torch.ones(4, 3).double())


def make_dense() -> None:
    """What the error names."""
    reference, model = pair(lambda: Made(True), lambda plan: plan.shard("<in:x>", Shard(1), mesh="axis"), {"axis": 2})
    assert_same_step(reference, model, torch.arange(12.0).view(4, 3).double())


@on_cpu()
def refusals() -> list[str]:
    make_dense()
    return [error_of(cut_sparse), error_of(cut_buffer), error_of(add_sparse), error_of(make_sparse)]


def test_what_is_refused(ranks: RankPools) -> None:
    for cut, buffer, added, made in ranks.run(refusals, world_size=2):
        assert all("sparse tensors must be the same on every rank. Remove the entry" in text for text in (cut, buffer))
        assert "for anything else, use a dense tensor, adj.to_dense()" in added
        assert "sparse_coo_tensor of DTensors of shapes [(2, 3), (3,)]" in made and "index_put" in made
