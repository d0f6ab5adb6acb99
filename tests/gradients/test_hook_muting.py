"""Quiet parameters: a reducer that knows which gradient of a bucket comes last is told of that one alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.gradients.buckets import of_buckets
from tests.gradients.test_reducer import assert_equal_gradients, data, meshes
from tests.ranks import RankPools
from vescale import GradientReducer
from vescale.comm import record_comms

F64 = torch.float64


class Branches(nn.Module):
    """Four layers, used in any order, in part, or more than once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)]).to(F64)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


class Pair:
    """A model with a reducer, and the same on one device."""

    def __init__(self, op: Any = "sum", bucket_bytes: Any = 2**20) -> None:
        self.model = Branches()
        self.reference = copy.deepcopy(self.model)
        self.reducer = GradientReducer(self.model, meshes((4,)), op=op, bucket_bytes=bucket_bytes)
        self.weight = 1.0 if op == "sum" else 1 / dist.get_world_size()

    def backward(self, step: int, *orders: tuple[int, ...], **kwargs: Any) -> None:
        """``orders``: one for all ranks, or one for each."""
        rank = dist.get_rank()
        all_orders = orders * dist.get_world_size() if len(orders) == 1 else orders
        self.model(data(step, rank, 3, 5), all_orders[rank]).square().sum().backward(**kwargs)

    def expect(self, step: int, *orders: tuple[int, ...]) -> None:
        all_orders = orders * dist.get_world_size() if len(orders) == 1 else orders
        for rank, order in enumerate(all_orders):
            (self.weight * self.reference(data(step, rank, 3, 5), order).square().sum()).backward()

    def step(self, step: int, *orders: tuple[int, ...], zero: bool = True) -> None:
        if zero:
            self.zero()
        self.backward(step, *orders)
        self.expect(step, *orders)
        assert_equal_gradients(self.model, self.reference)

    def zero(self) -> None:
        self.model.zero_grad()
        self.reference.zero_grad()

    @property
    def num_heard(self) -> int:
        return sum(slot.is_notified for bucket in self.reducer.buckets for slot in bucket.slots)

    @property
    def num_hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters())


FORWARD, BACKWARD = (0, 1, 2, 3), (3, 2, 1, 0)


def one_hook_a_bucket() -> None:
    for bucket_bytes, num_buckets in ((2**20, 1), ([500], 2)):
        for op in ("sum", "avg"):
            pair = Pair(op, bucket_bytes)
            for step in range(4):
                with record_comms() as ledger:
                    pair.step(step, FORWARD, zero=step != 2)
                assert len(of_buckets(ledger)) == pair.reducer.num_buckets == num_buckets
                assert pair.num_heard == pair.num_hooks == num_buckets


def another_order() -> None:
    """The one that is heard comes first of all: nothing is reduced before the others have come."""
    pair = Pair()
    pair.step(0, FORWARD)
    assert pair.num_heard == 1
    pair.step(1, BACKWARD)
    assert pair.num_heard == pair.num_hooks == 8
    pair.step(2, BACKWARD)
    assert pair.num_heard == pair.num_hooks == 8  # for longer than the first time
    pair.step(3, BACKWARD)
    assert pair.num_heard == pair.num_hooks == 1
    (heard,) = [slot.name for bucket in pair.reducer.buckets for slot in bucket.slots if slot.is_notified]
    assert heard.startswith("layers.3.")
    for step in range(4, 8):
        pair.step(step, *[(BACKWARD, FORWARD)[(rank + step) % 2] for rank in range(4)])


def launched_in_backward() -> None:
    """With one that is heard, the bucket is still launched before backward ends."""
    pair = Pair(bucket_bytes=[500])
    seen: list[int] = []
    with record_comms() as ledger:
        for step in range(3):
            pair.zero()
            x = data(step, dist.get_rank(), 3, 5).requires_grad_()
            x.register_hook(lambda _: seen.append(len(of_buckets(ledger))))
            before = len(of_buckets(ledger))
            pair.model(x, FORWARD).square().sum().backward()
            assert len(of_buckets(ledger)) == before + 2
            assert step == 0 or seen[-1] > before, "no bucket was launched while backward ran"


def in_part() -> None:
    """Backwards that reach only quiet parameters, and none of a rank's."""
    pair = Pair()
    pair.step(0, FORWARD)
    pair.step(1, (2,))
    pair.step(2, FORWARD)
    pair.step(3, (1, 2), (1,), (2,), (1, 2))
    for step in range(4, 9):
        pair.step(step, FORWARD, zero=step % 2 == 0)


def twice() -> None:
    """A parameter that is used twice has one gradient; of two backwards without zeroing the gradients are added."""
    pair = Pair()
    for step in range(3):
        pair.step(step, (0, 1, 0, 2, 3, 1))
    out = pair.model(data(5, dist.get_rank(), 3, 5), FORWARD).square().sum()
    pair.zero()
    out.backward(retain_graph=True)
    out.backward()
    for _ in range(2):
        pair.expect(5, FORWARD)
    assert_equal_gradients(pair.model, pair.reference)


def accumulated() -> None:
    """Under no_sync, also what the last backward does not reach, and in another order."""
    pair = Pair()
    for start, last in enumerate([FORWARD, (0, 1), BACKWARD, (3,), FORWARD]):
        pair.zero()
        with pair.reducer.no_sync():
            for micro in range(2):
                pair.backward(10 * start + micro, FORWARD)
                pair.expect(10 * start + micro, FORWARD)
        with record_comms() as ledger:
            pair.backward(10 * start + 2, last)
        pair.expect(10 * start + 2, last)
        assert_equal_gradients(pair.model, pair.reference)
        assert len(of_buckets(ledger)) == pair.reducer.num_buckets == 1


def by_hand() -> None:
    """A gradient that somebody puts there is this rank's contribution, in whatever backward."""
    pair = Pair()
    for step in range(3):
        pair.zero()
        for model in (pair.model, pair.reference):
            for layer in model.layers:
                layer.bias.grad = torch.full((5,), 1.0 if model is pair.model else 4.0, dtype=F64)
        pair.step(step, FORWARD if step < 2 else (1,), zero=False)


def graphs() -> None:
    pair = Pair()
    for step in range(3):
        pair.zero()
        pair.backward(step, FORWARD, create_graph=True)
        pair.expect(step, FORWARD)
        assert_equal_gradients(pair.model, pair.reference)
    assert not any(p.grad.requires_grad for p in pair.model.parameters())


def frozen() -> None:
    """The one that is heard no longer gets a gradient."""
    pair = Pair()
    for step in range(6):
        for model in (pair.model, pair.reference):
            model.layers[0].requires_grad_(step % 3 == 0)
        pair.step(step, FORWARD)
    assert pair.num_heard in (1, 8)


def broken_off() -> None:
    """Quiet gradients of a backward that an exception ends are this rank's no more; nan where they are missing."""
    pair, rank = Pair(), dist.get_rank()
    for step in range(2):
        pair.step(step, FORWARD)
    pair.zero()
    out = pair.model(data(2, rank, 3, 5), FORWARD).square().sum()
    handle = pair.model.layers[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    handle.remove()
    pair.reducer.finish()
    assert all(p.grad is None for p in pair.model.parameters())
    for step in range(3, 5):
        pair.step(step, FORWARD)


def broken_off_with_older_ones() -> None:
    """What was accumulated under no_sync before is not part of the sums that others get instead of nan."""
    pair, rank = Pair(), dist.get_rank()
    for step in range(3):
        pair.step(step, FORWARD)
    assert pair.num_heard == 1
    pair.zero()
    with pair.reducer.no_sync():
        pair.backward(3, FORWARD)
    if rank != 0:
        pair.backward(4, FORWARD)
        assert all(p.grad.isnan().all() for p in pair.model.parameters())
    else:
        out = pair.model(data(4, rank, 3, 5), FORWARD).square().sum()
        handle = pair.model.layers[3].bias.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.backward()
        handle.remove()
        pair.reducer.finish()
    for step in range(5, 8):
        pair.step(step, FORWARD)


def again_after_the_launch() -> None:
    """A quiet parameter gets a second contribution, in a recomputed part, when its bucket has been launched."""
    pair, rank, world = Pair(), dist.get_rank(), dist.get_world_size()
    for step in range(3):
        pair.step(step, FORWARD)
    assert pair.num_heard == 1
    for step in range(3, 6):
        pair.zero()
        x = data(step, rank, 3, 5).requires_grad_()
        for index in (3, 0, 1, 2, 3):
            x = torch.tanh(checkpoint(pair.model.layers[index], x, use_reentrant=True))
        x.square().sum().backward()
        pair.expect(step, *[(3, 0, 1, 2, 3)] * world)
        assert_equal_gradients(pair.model, pair.reference)
    pair.step(6, FORWARD)


def changed_layout_in_part() -> None:
    """As below, in a backward that does not fill the bucket."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    table = nn.Embedding(6, 4)
    GradientReducer(nn.ModuleList([first, last, table]), meshes((4,)))

    def backward(*, both: bool) -> None:
        for module in (first, last, table):
            module.zero_grad()
        x = first(torch.ones(3, 4))
        ((last(x) if both else x) + table(torch.tensor([0, 1, 2]))).sum().backward()

    for _ in range(3):
        backward(both=True)
    table.sparse = True
    with pytest.raises(RuntimeError, match=r"2\.weight\.grad is a torch\.sparse_coo tensor"):
        backward(both=False)


def changed_layout() -> None:
    """A quiet parameter's gradient comes sparse all at once: refused by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    GradientReducer(model, meshes((4,)))
    tokens = torch.tensor([0, 1, 2])

    def backward() -> None:
        model.zero_grad()
        model(tokens).sum().backward()

    backward()
    model[2].requires_grad_(False)
    for _ in range(4):
        backward()
    model[0].sparse = True
    with pytest.raises(RuntimeError, match=r"0\.weight\.grad is a torch\.sparse_coo tensor"):
        backward()
    model[0].sparse = False
    backward()
    assert torch.isfinite(model[0].weight.grad).all()


def one_call_a_backward() -> None:
    """Of the hooks that tell that a backward has begun, only the first of each backward is called: also after an exception,
    and after one that ended early."""
    calls: list[int] = []
    begin = GradientReducer._begin

    def counted(self: GradientReducer, *args: Any) -> None:
        calls.append(1)
        begin(self, *args)

    GradientReducer._begin = counted
    try:
        pair = Pair()
    finally:
        GradientReducer._begin = begin
    for step in range(4):
        pair.step(step, FORWARD)
        assert len(calls) == step + 1
    out = pair.model(data(9, dist.get_rank(), 3, 5), FORWARD).square().sum()
    handle = pair.model.layers[1].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    handle.remove()
    assert len(calls) == 6, "the first, and all hooks of the parameter that somebody else has hooked"
    pair.reducer.finish()
    pair.step(5, (2, 1))
    pair.step(6, FORWARD, zero=False)
    assert len(calls) == 8


@pytest.mark.helper("hook_gate")
def test_one_call_a_backward(ranks: RankPools) -> None:
    ranks.run(one_call_a_backward, timeout=60)


@pytest.mark.parametrize(
    "case",
    [
        one_hook_a_bucket,
        another_order,
        launched_in_backward,
        in_part,
        twice,
        accumulated,
        by_hand,
        graphs,
        frozen,
        broken_off,
        broken_off_with_older_ones,
        again_after_the_launch,
        changed_layout,
        changed_layout_in_part,
    ],
    ids=lambda case: case.__name__,
)
def test_quiet_parameters(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, timeout=60)
