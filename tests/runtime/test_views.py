"""Writing in place to tensors and to views of them, and indexing, on sharded and pending tensors, against one device."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.ranks import RankPool, RankPools, run_cases
from tests.runtime.compare import assert_same_gradients
from tests.runtime.llama import make_mesh
from tests.whole import whole
from vescale import parallelize, rng
from vescale.comm import record_comms
from vescale.ops import LIVE_COPIES
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationWarning, implicit_communication

ONES = torch.ones(4, 6, dtype=torch.float64)


def ones() -> torch.Tensor:
    """A plain tensor, also in a forward, which makes DTensors of what it creates."""
    return ONES.to(device_type())


def at(*index: Any) -> Any:
    return index if len(index) > 1 else index[0]


ALL = slice(None)

# What is done to y, a (4, 6) tensor; y itself is the result.
WRITES: dict[str, Callable[[Any], Any]] = {
    "row.fill_": lambda y: y[0].fill_(3.0),
    "column.fill_": lambda y: y[:, 0].fill_(3.0),
    "rows.mul_": lambda y: y[:2].mul_(2),
    "columns.mul_": lambda y: y[..., :3].mul_(2),
    "select.add_": lambda y: y.select(0, 1).add_(1),
    "narrow.mul_": lambda y: y.narrow(0, 0, 3).mul_(2),
    "view of a view": lambda y: y[1:3][0].add_(1),
    "row +=": lambda y: y.__setitem__(1, y[1].__iadd__(2)),
    "column +=": lambda y: y.__setitem__(at(ALL, 1), y[:, 1].__iadd__(2)),
    "row = number": lambda y: y.__setitem__(1, 2.0),
    "rows = rows": lambda y: y.__setitem__(slice(1, None), y[:-1].clone()),
    "columns = columns": lambda y: y.__setitem__(at(ALL, slice(1, None)), y[:, :-1].clone()),
    "mask = number": lambda y: y.__setitem__(y > 0, 0.5),
    "mask of rows = number": lambda y: y.__setitem__(y.sum(1) > 0, 0.5),
    "mask of rows, column = number": lambda y: y.__setitem__(at(y.sum(1) > 0, 2), 0.5),
    "mask = values": lambda y: y.__setitem__(torch.arange(24).view(4, 6) % 5 == 0, ones()[0, :5]),
    "positions = number": lambda y: y.__setitem__(torch.tensor([0, 2]), 1.0),
    "list = number": lambda y: y.__setitem__(at(ALL, [0, 2]), 1.0),
    "two lists = values": lambda y: y.__setitem__(at([0, 3], [1, 2]), ones()[0, :2]),
    "flat.mul_": lambda y: y.view(-1)[:7].mul_(2),
    "transposed.mul_": lambda y: y.t()[0].mul_(2),
    "diagonal.zero_": lambda y: y[:4, :4].diagonal().zero_(),
    "fill_diagonal_": lambda y: y.fill_diagonal_(1.0),
    "columns.copy_": lambda y: y[:, :2].copy_(ones()[:, :2]),
    "row.copy_": lambda y: y[0].copy_(ones()[0]),
    "relu of rows": lambda y: F.relu(y[:2], inplace=True),
    "row.masked_fill_": lambda y: y[0].masked_fill_(y[0] > 0, 0.0),
    "clamp_": lambda y: y.clamp_(-0.1, 0.1),
    "index_fill_": lambda y: y.index_fill_(1, torch.tensor([0, 2]), 5.0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0, 2]), ones()[:2]),
    "index_copy_": lambda y: y.index_copy_(1, torch.tensor([0, 2]), ones()[:, :2]),
    "scatter_": lambda y: y.scatter_(1, torch.tensor([[0], [1], [2], [3]]), 9.0),
    "scatter_add_": lambda y: y.scatter_add_(0, torch.zeros(1, 6, dtype=torch.long), ones()[:1]),
    "index_put_": lambda y: y.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), ones()[0, 0]),
    "row of detached.zero_": lambda y: y.detach()[0].zero_(),
    "out=": lambda y: torch.mul(y.detach()[0], 2, out=y.detach()[0]),
}
# These write to parts that autograd makes read-only.
WITHOUT_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "chunk.mul_": lambda y: y.chunk(2, 0)[0].mul_(2),
    "split.mul_": lambda y: y.split(2, 1)[0].mul_(2),
    "unbind.mul_": lambda y: y.unbind(1)[0].mul_(2),
    "iterate": lambda y: next(iter(y)).mul_(2),
}
READS: dict[str, Callable[[Any], Any]] = {
    "list": lambda y: y[[0, 2]],
    "list of columns": lambda y: y[:, [0, 2]],
    "two lists": lambda y: y[[0, 1], [1, 2]],
    "list of flags": lambda y: y[[True, False, True, False]],
    "array": lambda y: y[:, np.array([0, 2])],
    "range": lambda y: y[range(2)],
    "positions": lambda y: y[torch.tensor([0, 1]), 1:],
    "mask": lambda y: y[y.sum(1) > 0],
    "new dims": lambda y: y[None, :, None, 1],
    "steps": lambda y: y[::2, ..., -1],
    "a view, then a write to it": lambda y: y[0].add_(1) * y[0],
}


CUTS = ("rows", "columns", "pending")


class Apply(nn.Module):
    """Applies one of the functions above; another one in each case, since ``parallelize`` takes longer than a case."""

    change: Callable[[Any], Any]
    returns: bool

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        changed = self.change(y)
        return changed if self.returns else y


def pair(mesh: Any, cut: str) -> tuple[Apply, Apply]:
    """On one device, and on the mesh."""
    torch.manual_seed(0)
    reference = Apply().double()
    model = copy.deepcopy(reference)
    plan = Plan(mesh)
    if cut == "rows":
        plan.shard("<in:x>", Shard(0))
    elif cut == "columns":
        plan.shard("linear.(weight|bias)", Shard(0)).shard("linear.<in>", Replicate())
    else:
        plan.shard("linear.weight", Shard(1))
    return reference, parallelize(model, plan)


def same(models: tuple[Apply, Apply], name: str, returns: bool, grad: bool) -> None:
    for each in models:
        each.zero_grad()
        each.change, each.returns = {**WRITES, **WITHOUT_GRADIENTS, **READS}[name], returns
    reference, model = models
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        expected, found = reference(x), model(x)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(whole(found.detach()), expected.detach())
    if grad and expected.requires_grad:
        expected.square().sum().backward()
        found.square().sum().backward()
        assert_same_gradients(reference, model)


def writes(cut: str) -> None:
    models = pair(make_mesh(tp=2), cut)
    cases: list[Any] = [(models, name, False, True) for name in WRITES]
    cases += [(models, name, False, False) for name in (*WITHOUT_GRADIENTS, "row.fill_", "columns.copy_", "clamp_")]
    cases += [(models, name, True, True) for name in READS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImplicitCommunicationWarning)
        run_cases(same, cases)


@pytest.mark.parametrize("cut", CUTS)
def test_writes_reach_what_was_viewed(ranks: RankPools, cut: str) -> None:
    ranks.run(writes, cut, world_size=2)


def writes_outside_of_models(cut: str) -> None:
    """What any program may have done with DTensors before; some of it stock DTensor refuses, on every rank."""
    mesh = make_mesh(tp=2)
    placement, local = {
        "rows": (Shard(0), ones()[:2]),
        "columns": (Shard(1), ones()[:, :3]),
        "pending": (Partial(), ones()),
    }[cut]
    for change in WRITES.values():
        y = DTensor.from_local(local.clone(), mesh, [placement])
        with contextlib.suppress(Exception), implicit_replication():
            change(y)


def test_writes_reach_what_was_viewed_whatever_ran_before() -> None:
    """PyTorch's dispatcher keeps what it called first, and how it decided, for the life of a process."""
    pool = RankPool(2)
    try:
        for cut in CUTS:
            pool.run(writes_outside_of_models, cut)
        for cut in CUTS if NIGHTLY else CUTS[:1]:
            pool.run(writes, cut)
            pool.run(writes_outside_of_models, cut)
            pool.run(writes, cut)
    finally:
        pool.close()


def draws_in_views(parallel_first: bool) -> None:
    """In a process of its own: what is enabled stays so."""
    mesh = make_mesh(tp=2)
    if not parallel_first:
        rng.enable()
    parallelize(nn.Linear(2, 2), Plan(mesh))
    if parallel_first:
        rng.disable()
        rng.enable()

    def drawn(y: Any) -> Any:
        torch.manual_seed(3)
        y[1].normal_()
        y[2:].uniform_()
        return y

    placed = DTensor.from_local(ones().chunk(2)[0].clone(), mesh, [Shard(0)])
    torch.testing.assert_close(whole(drawn(placed)), drawn(ones().clone()), rtol=0, atol=0)


@pytest.mark.parametrize("parallel_first", [True, False])
def test_draws_reach_what_was_viewed(parallel_first: bool) -> None:
    pool = RankPool(2)
    try:
        pool.run(draws_in_views, parallel_first)
    finally:
        pool.close()


def flattened_on_rank() -> None:
    """A dim that two axes cut, one after the other, is merged with the one before it, and taken apart again."""
    mesh = make_mesh(a=2, b=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))  # teaches DTensor
    x = torch.arange(4 * 8 * 3, dtype=torch.float64).view(4, 8, 3)
    own = distribute_tensor(x, mesh, [Shard(1), Shard(1)], src_data_rank=None).requires_grad_()
    with record_comms() as comms:
        flat = own.flatten(0, 1) * 2
        (back,) = torch.autograd.grad(flat, own, flat)
    assert not comms.records and back.placements == own.placements
    assert torch.equal(back.full_tensor(), 4 * x) and torch.equal(flat.full_tensor(), 2 * x.flatten(0, 1))


def test_a_dim_that_two_axes_cut_is_flattened_and_taken_apart(ranks: RankPools) -> None:
    ranks.run(flattened_on_rank)


class Masked(nn.Module):
    """A mask made as transformers makes them, by ``vmap`` of a function of positions that needs some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def visible(batch: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            return column < 5

        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            visible = torch.vmap(visible, in_dims=dims)
        mask = visible(torch.arange(x.shape[0]), torch.arange(x.shape[1]), torch.arange(8))
        return self.up(x) * mask


def vmapped() -> None:
    mesh = make_mesh(tp=2)
    torch.manual_seed(0)
    reference = Masked().double()
    model = copy.deepcopy(reference)
    parallelize(model, Plan(mesh).shard("up.(weight|bias)", Shard(0)), strict=True)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(whole(model(x)), reference(x))


def test_a_mode_sees_nothing_of_how_shapes_are_found(ranks: RankPools) -> None:
    ranks.run(vmapped, world_size=2)


def again() -> None:
    """What a view that cuts a sharded dim does is communication that no plan asks for: making it, and reading it after a
    write to its base."""
    mesh = make_mesh(tp=2)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def late(y: Any, writes: bool) -> Any:
        row = y[0]
        if writes:
            y.mul_(2)
        return row * 3

    counts = []
    for writes in (False, True):
        torch.manual_seed(0)
        model = Apply().double()
        model.change, model.returns = functools.partial(late, writes=writes), True
        parallelize(model, Plan(mesh).shard("<in:x>", Shard(0)))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", ImplicitCommunicationWarning)
            model(x)
        counts.append(sum(implicit_communication(model).values()))
    assert counts == [1, 2], counts


def test_reading_an_old_view_is_reported(ranks: RankPools) -> None:
    ranks.run(again, world_size=2)


def forgotten() -> None:
    """Writes are followed, which costs time, as long as a view of a copy exists, and no longer."""
    x = distribute_tensor(ones(), make_mesh(tp=2), [Shard(0)], src_data_rank=None)
    parallelize(nn.Linear(2, 2), Plan(x.device_mesh))  # teaches DTensor
    gc.collect()
    before = set(LIVE_COPIES)
    row = x[0]
    column = row[:2]
    del row
    assert before < LIVE_COPIES and column.shape == (2,)
    del column
    gc.collect()
    assert before >= LIVE_COPIES


def test_a_copy_is_forgotten_with_its_last_view(ranks: RankPools) -> None:
    ranks.run(forgotten, world_size=2)
