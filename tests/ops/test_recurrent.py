"""Recurrent networks, bags of embeddings and in-place views over sharded rows against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.comm import record_comms
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationError

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Calls(nn.Module):
    """A module that is called as ``call`` says."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> Any:
        return self.call(self.inner, x) if more is None else self.call(self.inner, x, more)


def output(inner: Any, x: Any, *more: Any) -> Any:
    """What depends on all results."""
    found, last = inner(x, *more)
    return found.square().sum() + sum((part.sin().sum() for part in (last if isinstance(last, tuple) else (last,))), 0)


def packed(inner: Any, x: Any) -> Any:
    rows = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2, 1], device="cpu"), batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(inner(rows)[0], batch_first=True)[0].square().sum()


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(mesh: Any, inner: nn.Module, call: Any, data: tuple[torch.Tensor, ...], placed: Any, strict: bool) -> None:
    reference = Calls(copy.deepcopy(inner), call)
    model = copy.deepcopy(reference)
    plan = Plan(mesh)
    plan.shard("<in:x>", dict(zip(("dp", "tp"), placed)))
    if len(data) > 1:
        plan.shard("<in:more>", dict(zip(("dp", "tp"), placed)))
    parallelize(model, plan, strict=strict)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = reference(*data)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        with record_comms() as comms:
            found = model(*data)
        assert torch.equal(torch.get_rng_state(), state)
        assert not strict or comms.count() == comms.count("all_reduce"), comms  # of the sums in ``output``
        torch.testing.assert_close(full(found), expected)
        expected.sum().backward()
        found.sum().backward()
        for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), name
            if other.grad is not None:
                torch.testing.assert_close(full(own.grad), other.grad, msg=name)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def recurrent() -> int:
    mesh, options = make_mesh(dp=2, tp=2), {"dtype": torch.float64}
    torch.manual_seed(0)
    first = nn.LSTM(3, 4, num_layers=2, batch_first=True, **options)
    cases: list[Any] = [
        (mesh, first, output, (double(4, 5, 3),), (S0, R), True),
        (mesh, first, output, (double(5, 5, 3),), (S0, S0), True),  # uneven, and a rank without rows
        (mesh, nn.LSTM(3, 4, bidirectional=True, proj_size=2, **options), output, (double(5, 4, 3),), (S1, R), True),
        (mesh, nn.GRU(3, 4, num_layers=2, bidirectional=True, **options), output, (double(5, 4, 3),), (R, S1), True),
        (mesh, nn.GRU(3, 4, batch_first=True, bias=False, **options), output, (double(4, 5, 3),), (S0, R), True),
        (mesh, nn.RNN(3, 4, batch_first=True, **options), output, (double(4, 5, 3),), (S0, R), True),
        (mesh, nn.RNN(3, 4, nonlinearity="relu", **options), output, (double(5, 4, 3),), (S1, R), True),
        (mesh, nn.GRU(3, 4, **options), output, (double(5, 4, 3), double(1, 4, 4)), (S1, R), True),
        (mesh, nn.GRU(3, 4, **options), output, (double(5, 4, 3),), (S0, R), False),  # time is cut: gathered
        (mesh, nn.LSTM(3, 4, 2, batch_first=True, dropout=0.5, **options), output, (double(4, 5, 3),), (S0, R), True),
        # Features are cut, too: gathered, before the dropout.
        (mesh, nn.GRU(3, 4, 2, dropout=0.5, **options), output, (double(5, 4, 3),), (S1, Shard(2)), False),
        (mesh, nn.LSTM(3, 4, batch_first=True, **options), packed, (double(4, 5, 3),), (S0, R), False),
        (mesh, nn.LSTMCell(3, 4, **options), lambda m, x: m(x)[0].square().sum(), (double(4, 3),), (S0, R), False),
    ]
    return run_cases(same, cases)


def test_recurrent_networks(ranks: RankPools) -> None:
    assert set(ranks.run(recurrent)) == {13}


def bags() -> int:
    mesh = make_mesh(dp=2, tp=2)
    torch.manual_seed(0)
    indices = torch.randint(9, (5, 3))

    def summed(inner: Any, x: Any, *more: Any) -> Any:
        return inner(x, *more).square().sum()

    def weighted(inner: Any, x: Any, weights: Any) -> Any:
        return inner(x, per_sample_weights=weights).square().sum()

    def by_offsets(inner: Any, x: Any) -> Any:
        return inner(x, torch.tensor([0, 2, 2, 5])).square().sum()

    def bag(**options: Any) -> nn.Module:
        return nn.EmbeddingBag(9, 4, dtype=torch.float64, **options)

    cases: list[Any] = [(mesh, bag(mode=m), summed, (indices,), (S0, S0), True) for m in ("sum", "mean", "max")]
    cases += [
        (mesh, bag(padding_idx=2), summed, (indices,), (S0, R), True),
        (mesh, bag(mode="sum"), weighted, (indices, double(5, 3)), (S0, R), True),
        (mesh, bag(), by_offsets, (indices.flatten(),), (S0, R), False),
        (mesh, bag(max_norm=1.0), summed, (indices,), (R, R), False),
    ]
    return run_cases(same, cases)


def test_bags_of_embeddings(ranks: RankPools) -> None:
    assert set(ranks.run(bags)) == {7}


def refused() -> None:
    mesh = make_mesh(dp=4)
    model = Calls(nn.EmbeddingBag(9, 4, max_norm=1.0), lambda inner, x: inner(x))
    parallelize(model, Plan(mesh).shard("<in:x>", {"dp": S0}))
    with pytest.raises(
        NotImplementedError, match=r"max_norm .*over bags of shape \(4, 3\).*write R for the module's <in>"
    ):
        model(torch.zeros(4, 3, dtype=torch.long))
    model = Calls(nn.GRU(3, 4), lambda inner, x: inner(x)[0])
    parallelize(model, Plan(mesh).shard("<in:x>", {"dp": S0}), strict=True)
    with pytest.raises(ImplicitCommunicationError, match="gru"):
        model(torch.zeros(4, 2, 3))  # the time, not the batch, is cut


def test_what_needs_other_rows(ranks: RankPools) -> None:
    ranks.run(refused)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, -1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_(2)": lambda x: x.squeeze_(2),
    "squeeze_(1)": lambda x: x.squeeze_(1),
    "squeeze_((2, 0))": lambda x: x.squeeze_((2, 0)),
}


def in_place(mesh: Any, name: str, placed: Any) -> None:
    expected = torch.arange(20.0).view(4, 5, 1)
    found = distribute_tensor(expected.clone(), mesh, placed, src_data_rank=None)
    local = found.to_local()
    assert VIEWS[name](found) is found
    VIEWS[name](expected)
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    assert torch.equal(found.full_tensor(), expected)
    found.add_(1)
    assert torch.equal(local, distribute_tensor(torch.arange(1, 21.0).view(4, 5, 1), mesh, placed).to_local())


def in_place_views() -> int:
    mesh = make_mesh(dp=2, tp=2)
    parallelize(nn.Linear(2, 2), Plan(mesh))  # what installs the handlers
    return run_cases(in_place, [(mesh, name, p) for name in VIEWS for p in [(S0, R), (S0, S1), (R, S1), (R, R)]])


def test_in_place_views_change_the_tensor_itself(ranks: RankPools) -> None:
    assert set(ranks.run(in_place_views)) == {28}
