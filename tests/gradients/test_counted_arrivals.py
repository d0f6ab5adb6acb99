"""Gradients of a parallelized model are counted in C++, which calls Python for the last of a bucket; sums are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.gradients.buckets import of_buckets
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import Plan, parallelize
from vescale.comm import record_comms
from vescale.compat import arrival_count
from vescale.gradients import _reducer
from vescale.gradients._bucket import Bucket
from vescale.runtime import gradient_reducer, no_sync
from vescale.static import report

F64 = torch.float64
FORWARD, BACKWARD = (0, 1, 2, 3), (3, 2, 1, 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Branches(nn.Module):
    """Four blocks in any order, or some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.to(F64)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.square().sum()


class Pair:
    """A model on dp x tp, and the same on one device. ``takes``: how often Python heard of a gradient."""

    def __init__(self, mode: Any) -> None:
        self.mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        plan = Plan(self.mesh)
        plan.shard("<in:x>", {"dp": Shard(0)})
        plan.shard(r"blocks\.\d+.up.(weight|bias)", {"tp": Shard(0)})
        plan.shard(r"blocks\.\d+.up.<in>", {"tp": Replicate()})
        plan.shard(r"blocks\.\d+.down.weight", {"tp": Shard(1)})
        plan.shard(r"blocks\.\d+.down.<out>", {"tp": Replicate()})
        self.mode, self.reference = mode, Branches()
        self.model = parallelize(Branches(), plan, mode=mode)
        self.takes = 0
        reducer = gradient_reducer(self.model)
        assert reducer is not None
        self.reducer = reducer

    def loss(self, step: int, order: tuple[int, ...]) -> torch.Tensor:
        """Of the model; the reference has run backward."""
        x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(step))
        self.reference(x, order).backward()
        found: torch.Tensor = self.model(x, order)
        return found

    def zero(self) -> None:
        self.model.zero_grad()
        self.reference.zero_grad()

    def step(self, step: int, order: tuple[int, ...] = FORWARD, *, zero: bool = True) -> None:
        if zero:
            self.zero()
        loss = self.loss(step, order)
        with record_comms() as ledger:
            loss.backward()
        reduced = of_buckets(ledger)
        assert len(reduced) == self.reducer.num_buckets or order != FORWARD
        self.same()

    def same(self) -> None:
        found: Any = whole_tensors({name: own.grad for name, own in self.model.named_parameters()})
        for (name, own), other in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            if other.grad is None:
                assert own.grad is None, name
                continue
            assert isinstance(own.grad, DTensor), name
            torch.testing.assert_close(found[name], other.grad, rtol=1e-12, atol=1e-12, msg=name)


def counted(pair: Pair, step: int) -> int:
    """How often Python hears of a gradient in a step."""
    calls = []
    take = _reducer.Bucket.accept

    def accept(self: Any, slot: Any) -> bool:
        calls.append(slot)
        return take(self, slot)

    _reducer.Bucket.accept = accept  # type: ignore[method-assign]
    try:
        pair.step(step)
    finally:
        _reducer.Bucket.accept = take  # type: ignore[method-assign]
    return len(calls)


def one_call_a_bucket(pair: Pair) -> None:
    for step in range(3):
        pair.step(step)
    num_parameters = len(list(pair.model.parameters()))
    expected = pair.reducer.num_buckets if arrival_count._library() is not None else num_parameters
    assert [counted(pair, step) for step in range(3, 6)] == [expected] * 3
    if pair.mode == "static":
        assert report(pair.model).static_steps >= 4, report(pair.model)


def placed(pair: Pair) -> None:
    """In static mode on a CPU, all gradients of a bucket but the first and the last of a backward are in it when it
    collects them; where it does not, they become the parameters' again."""
    places = pair.mode == "static" and device_type() == "cpu"
    found: list[int] = []
    collected, returned = Bucket._collect, Bucket._return_placed

    def collect(self: Bucket, versions: Any) -> bool:
        found.append(len(self.arrivals.placed()))
        return collected(self, versions)

    def give_back(self: Bucket) -> None:
        num_placed = len(self.arrivals.placed())
        returned(self)
        if num_placed:
            found.append(-sum(slot.parameter is not None and slot.parameter.grad is not None for slot in self.slots))

    Bucket._collect, Bucket._return_placed = collect, give_back  # type: ignore[method-assign]
    try:
        for step in range(6):
            pair.step(step)
        num_placed, total = max(found), len(list(pair.model.parameters()))
        assert num_placed == (total - 2 if places and pair.reducer.num_buckets == 1 else 0), found
        del found[:]
        pair.zero()
        loss = pair.loss(6, FORWARD)
        handle = pair.model.blocks[0].up.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        for step in range(7, 9):
            pair.step(step)
        assert (min(found) < 0) == places, found
        pair.zero()
        loss = pair.loss(9, FORWARD)
        extra = 0
        for parameter, other in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            extra = extra + parameter.square().sum()  # a second gradient of each, from outside of the model
            other.grad.add_(other.detach(), alpha=2)  # type: ignore[union-attr]
        (loss + extra).backward()
        pair.same()
    finally:
        Bucket._collect, Bucket._return_placed = collected, returned  # type: ignore[method-assign]


def orders_and_parts(pair: Pair) -> None:
    orders = [FORWARD, FORWARD, BACKWARD, BACKWARD, (2,), FORWARD, (1, 2), (0, 1, 0, 3), FORWARD, FORWARD]
    for step, order in enumerate(orders):
        pair.step(step, order)


def on_top(pair: Pair) -> None:
    """Of what is complete, of what was accumulated, and of several forwards."""
    for step in range(8):
        pair.step(step, zero=step % 3 == 0)
    for last in (FORWARD, (0, 1), FORWARD):
        pair.zero()
        with no_sync(pair.model):
            for micro in range(2):
                pair.loss(10 + micro, FORWARD).backward()
        pair.step(12, last, zero=False)
    pair.zero()
    losses = [pair.loss(20 + step, FORWARD) for step in range(2)]
    for loss in losses:
        loss.backward()
    pair.same()
    pair.step(30)


def exceptions(pair: Pair) -> None:
    """Gradients that were counted before an exception belong to no later backward."""
    for step in range(3):
        pair.step(step)
    for index in (0, 3):
        pair.zero()
        loss = pair.loss(3, FORWARD)
        handle = pair.model.blocks[index].up.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        for step in range(4, 7):
            pair.step(step)


def hooks_of_users(pair: Pair) -> None:
    """They are called for each gradient; one that takes gradients away leaves its bucket without."""
    seen: list[int] = []
    handle = pair.model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    for step in range(4):
        pair.step(step)
    assert len(seen) == 4
    handle.remove()
    for step in range(4, 7):
        pair.step(step)
    assert len(seen) == 4


def captured(pair: Pair) -> None:
    """What ``torch.autograd.grad`` returns is not counted, and ``inputs`` count alone."""
    for step in range(3):
        pair.step(step)
    own, other = list(pair.model.parameters()), list(pair.reference.parameters())
    for step in range(3, 5):
        pair.zero()
        loss = pair.loss(step, FORWARD)
        found = whole_tensors(dict(enumerate(torch.autograd.grad(loss, own))))
        for one, parameter in zip(found.values(), other, strict=True):
            assert one is not None and parameter.grad is not None
            torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=1e-12)
        pair.step(step)
        pair.zero()
        pair.loss(step, FORWARD).backward(inputs=own[:2])
        for parameter in other[2:]:
            parameter.grad = None
        pair.same()
        pair.step(step)


def frozen(pair: Pair) -> None:
    for step in range(9):
        for model in (pair.model, pair.reference):
            model.blocks[3].requires_grad_(step // 3 != 1)
        pair.step(step, (0, 1, 2) if step == 4 else FORWARD)


CASES = [one_call_a_bucket, placed, orders_and_parts, on_top, exceptions, hooks_of_users, captured, frozen]


def in_mode(mode: str, case: Callable[[Pair], None]) -> None:
    if mode != "python":
        case(Pair(mode))
        return
    library, arrival_count._library = arrival_count._library, lambda: None
    try:
        case(Pair("eager"))
    finally:
        arrival_count._library = library


@pytest.mark.helper("hook_gate")
@pytest.mark.helper("dispatch")
@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_counted_arrivals(ranks: RankPools, mode: str, case: Callable[[Pair], None]) -> None:
    ranks.run(in_mode, mode, case, timeout=60)


@pytest.mark.parametrize("case", [one_call_a_bucket, on_top], ids=lambda case: case.__name__)
def test_counted_in_python(ranks: RankPools, case: Callable[[Pair], None]) -> None:
    ranks.run(in_mode, "python", case, timeout=60)


def other_orders_on_other_ranks() -> None:
    """Ranks of one model that run its blocks in different orders, each along dp, launch the same buckets."""
    pair = Pair("eager")
    for step in range(8):
        orders = [FORWARD, BACKWARD] if step % 2 else [(1, 3, 0, 2), FORWARD]
        pair.zero()
        x = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(step))
        for part, order in zip(x.chunk(2), orders):
            pair.reference(part, order).backward()
        loss = pair.model(x, Order(orders[pair.mesh.get_local_rank("dp")]))
        loss.backward()
        pair.same()


class Order:
    """Numbers that ranks do not compare."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)


def test_other_orders_on_other_ranks(ranks: RankPools) -> None:
    ranks.run(other_orders_on_other_ranks, timeout=60)
