"""Several reducers of the same ranks reduce in one order, or all ranks raise one error before a sum mixes parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.device import device_type
from tests.ranks import RankPools
from tests.simulate import simulate
from vescale import GradientReducer
from vescale.agreement import Round
from vescale.comm import record_comms
from vescale.errors import OrderMismatchError
from vescale.gradients._reducer_turns import RootTurn


class Branches(nn.Module):
    """Some parameters are used on some ranks only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(width, 4)
        self.double()

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        x = self.up(x)
        return self.down(x) + (self.side(x) if aside else 0)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


class Pair:
    """Two models with a reducer each, and the same models on one device."""

    def __init__(self, widths: tuple[int, int]) -> None:
        self.models = [Branches(width) for width in widths]
        generator = torch.Generator().manual_seed(0)  # of its own: ranks may be threads
        for model in self.models:
            for parameter in model.parameters():
                parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        self.one = copy.deepcopy(self.models)
        mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
        self.reducers = [GradientReducer(model, mesh, bucket_bytes=200) for model in self.models]

    def loss(self, models: list[nn.Module], order: tuple[int, ...], rank: int) -> torch.Tensor:
        x = batch(rank)
        for number in order:
            x = models[number](x, aside=(rank + number) % 2 == 0)
        return x.square().sum()

    def equal(self, order: tuple[int, ...], apart: bool = False) -> None:
        """A step is that of one device: in one backward, or ``apart``, in one for each model."""
        world, rank = dist.get_world_size(), dist.get_rank()
        for model in (*self.models, *self.one):
            model.zero_grad()
        for each in [(number,) for number in order] if apart else [order]:
            self.loss(self.models, each, rank).backward()
            (sum(self.loss(self.one, each, other) for other in range(world)) / world).backward()
        for own, one in zip(self.models, self.one):
            for (name, parameter), reference in zip(own.named_parameters(), one.parameters()):
                assert (parameter.grad is None) == (reference.grad is None), name
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-12, atol=1e-12)


def in_another_order(widths: tuple[int, int], apart: bool) -> None:
    pair, rank = Pair(widths), dist.get_rank()
    for order in ((0, 1), (0, 1), (1, 0), (0,), (1,), (0, 1)):
        pair.equal(order, apart)
    for model in pair.models:
        model.zero_grad()
    order = (0, 1) if rank == 0 else (1, 0)
    with pytest.raises(OrderMismatchError) as caught:
        for each in [(number,) for number in order] if apart else [order]:
            pair.loss(pair.models, each, rank).backward()
    found: list[str | None] = [None] * 2
    dist.all_gather_object(found, str(caught.value))
    assert found[0] == found[1]
    for number, model in enumerate(pair.models):
        assert f"(reducer {pair.reducers[number]._parameters.turn.number} of these ranks) on rank" in str(caught.value)
        assert all(parameter.grad is None for parameter in model.parameters())
    for order in ((1, 0), (0, 1)):
        pair.equal(order, apart)
    pair.reducers[1].remove()
    pair.reducers[0].remove()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("widths", [(8, 8), (8, 12)], ids=["equal", "different"])
def test_reducers_in_another_order(ranks: RankPools, widths: tuple[int, int], apart: bool) -> None:
    ranks.run(in_another_order, widths, apart, world_size=2)


def what_is_sent() -> None:
    """16 bytes of an all-reduce, while there are several reducers."""
    pair = Pair((8, 8))
    pair.equal((0, 1), apart=True)
    with record_comms() as ledger:
        pair.equal((0, 1), apart=True)
    asked = [record.bytes for record in ledger.records if record.requester == "which reducer reduces"]
    assert len(asked) == 2 and max(asked) <= 32
    with pytest.raises(OrderMismatchError):
        for number in (0, 1) if dist.get_rank() == 0 else (1, 0):
            pair.loss(pair.models, (number,), dist.get_rank()).backward()
    pair.equal((0, 1), apart=True)
    pair.reducers[0].remove()
    with record_comms() as ledger:
        pair.loss(pair.models, (1,), dist.get_rank()).backward()
    assert not any(record.requester == "which reducer reduces" for record in ledger.records)


def test_what_is_sent() -> None:
    simulate(what_is_sent, 2)


def roots() -> list[int]:
    """In which backwards of two roots ranks compare, where cases before may have had others."""
    asked: list[int] = []
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        made = [RootTurn(range(dist.get_world_size()), name, torch.device(device_type())) for name in "ab"]
        patch.setattr(Round, "exchange", lambda rounds, message, about: asked.append(len(steps)) or [message])
        while len(steps) < 15:
            for root in made:
                root.take()
                root.end()
            steps.append(1)
    return asked


def test_roots_compare_a_few_times(ranks: RankPools) -> None:
    """In a steady step nobody waits: heartbeats tell which root has reduced."""
    for asked in ranks.run(roots, world_size=2):
        assert asked[:6] == [0, 0, 1, 1, 2, 2] and max(asked) < 12
