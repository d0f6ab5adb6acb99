"""Parameters that are replaced, tied, removed or added in modules after fully_shard: used, or refused on every rank."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fsdp.compare import by_block, full, mesh_of, train_step
from tests.fsdp.models import Net, net_loss, tokens
from tests.ranks import RankPools, run_cases
from vescale.errors import StrayParameterError
from vescale.fsdp import fully_shard


def sharded(build: Any = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build()
    by_block(model, fully_shard, mesh_of(), **options)
    return model


def replaced(after_a_step: bool, gathered: bool) -> None:
    """A new parameter, sharded or whole, is what the next forward uses and trains, in the gathered root as in a block."""
    models: list[Any] = [sharded(reshard_after_forward=False if gathered else None)]
    torch.manual_seed(0)
    models.append(Net())
    everyone = list(range(dist.get_world_size()))
    ranks = [[dist.get_rank()], everyone]
    if after_a_step:
        train_step(models[0], 0, net_loss, ranks[0])
        models[0].zero_grad()
    if gathered:
        with torch.no_grad():
            models[0](tokens(0, 0))
    for model in models:
        model.head.bias = nn.Parameter(torch.arange(11.0) / 11)
        weight = model.blocks[1].up.weight
        doubled = weight.detach() * 2 if model is models[1] or not gathered else full(weight).detach() * 2  # type: ignore[union-attr]
        model.blocks[1].up.weight = nn.Parameter(doubled)
    losses = [train_step(model, 1, net_loss, of) for model, of in zip(models, ranks, strict=True)]
    dist.all_reduce(losses[0])
    torch.testing.assert_close(losses[0] / len(everyone), losses[1])
    for (name, own), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert isinstance(own, DTensor), name
        torch.testing.assert_close(full(own), expected, msg=lambda m, name=name: f"{name}: {m}")
        torch.testing.assert_close(full(own.grad), expected.grad, msg=lambda m, name=name: f"{name}.grad: {m}")


class Alike(Net):
    """Embedding and head of one shape, which could be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 11, bias=False)


def tied_afterwards() -> None:
    for first_forward in (False, True):
        model = sharded(Alike)
        if first_forward:
            net_loss(model, 0, dist.get_rank()).backward()
        model.head.weight = model.embed.weight
        for _ in range(2):  # it does not pass unnoticed the second time
            with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' .* were tied after fully_shard"):
                model(tokens(0, 0))


def untied() -> None:
    """A tied parameter is replaced in one place, or in both."""
    model = sharded(lambda: Net(tied=True))
    net_loss(model, 0, dist.get_rank()).backward()
    model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
    with pytest.raises(ValueError, match="replaced in 1 of its 2 places"):
        model(tokens(0, 0))
    model.embed.weight = model.head.weight
    net_loss(model, 0, dist.get_rank()).backward()
    assert model.embed.weight is model.head.weight and isinstance(model.embed.weight, DTensor)


def removed() -> None:
    model = sharded()
    model.head.bias = None
    with pytest.raises(ValueError, match=r"'head.bias' .* was removed after fully_shard"):
        model(tokens(0, 0))


def functional() -> None:
    """Stock FSDP2 computes with the parameters, and not with what is given."""
    model = sharded()
    net_loss(model, 0, dist.get_rank()).backward()
    values = {name: value * 2 for name, value in model.state_dict().items()}
    with pytest.raises(NotImplementedError, match=r"as after torch.func.functional_call"):
        torch.func.functional_call(model, values, (tokens(0, 0),))
    net_loss(model, 0, dist.get_rank()).backward()


def added() -> None:
    """What nobody reduces is refused, also when it comes, or is unfrozen, later; what was ignored on purpose is not."""
    refuses = functools.partial(pytest.raises, StrayParameterError)
    for later in (False, True):
        model = sharded()
        if later:
            net_loss(model, 0, dist.get_rank()).backward()
        model.blocks[1].adapter = nn.Linear(7, 7)
        for _ in range(2):
            with refuses(match=r"'blocks.1.adapter.weight', 'blocks.1.adapter.bias' of Net: trainable"):
                model(tokens(0, 0))
        with torch.no_grad():
            model(tokens(0, 0))
        model.blocks[1].adapter.requires_grad_(False)
        model(tokens(0, 0))
        model.blocks[1].adapter.bias.requires_grad_(True)
        with refuses(match=r"'blocks.1.adapter.bias' of Net.* pass the new module to fully_shard"):
            model(tokens(0, 0))
        fully_shard(model.blocks[1].adapter, mesh=mesh_of())
        net_loss(model, 0, dist.get_rank()).backward()
    torch.manual_seed(0)
    other: Any = Net()
    ignored = {other.head.weight, other.blocks[0].norm.bias}
    by_block(other, fully_shard, mesh_of(), ignored_params=ignored)
    other.blocks[1].adapter = nn.Linear(7, 7).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(tokens(0, 0))
        model(tokens(0, 0))


def sparse() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 7, sparse=True)

    model = sharded(Sparse)
    with pytest.raises(NotImplementedError, match=r"gradient of 'embed.weight' .* is a torch.sparse_coo tensor"):
        net_loss(model, 0, dist.get_rank()).backward()


CASES: list[tuple[Any, ...]] = [
    *((replaced, after, gathered) for after in (False, True) for gathered in (False, True)),
    (tied_afterwards,),
    (untied,),
    (removed,),
    (functional,),
    (added,),
    (sparse,),
]


def run_case(part: Any, *arguments: Any) -> None:
    part(*arguments)


def run() -> int:
    return run_cases(run_case, CASES)


def test_replaced_parameters(ranks: RankPools) -> None:
    assert ranks.run(run, world_size=2) == [len(CASES)] * 2
