"""fully_shard on modules that deferred_init() made: the values of plain construction, without the whole of any parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.fsdp.compare import full, mesh_of
from tests.ranks import RankPools, run_cases
from vescale.compat import local_of
from vescale.fsdp import fully_shard
from vescale.rng import _deferred_replay, _materialize, deferred_init, has_deferred

_WHOLE_VALUES = _deferred_replay.whole_values


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("angles", torch.outer(torch.arange(5.0), torch.rand(width)))
        self.scale = torch.full((1,), 0.5) * torch.rand(1)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunks = self.up(self.norm(x)).chunk(3, -1)
        return x + (chunks[0] * chunks[1] + chunks[2]) * self.scale + self.get_buffer("angles").sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        nn.init.trunc_normal_(self.embed.weight, std=0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(deferred: bool, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """The sharded model, and what is drawn after its construction."""
    torch.manual_seed(5)
    if deferred:
        with deferred_init():
            model = Model()
    else:
        model = Model()
    after = torch.rand(3)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(), **options)
    return fully_shard(model, mesh=mesh_of(), **options), after


def same_as_plain_construction(dim: int | None) -> None:
    options: dict[str, Any] = {}
    if dim is not None:
        options["shard_placement_fn"] = lambda p: Shard(dim) if p.ndim > dim and p.shape[dim] % 3 == 0 else None
    whole: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for user in (_deferred_replay, _materialize):
            patch.setattr(
                user, "whole_values", lambda view, time: whole.append(view.numel) or _WHOLE_VALUES(view, time)
            )
        found, after = build(True, **options)
    expected, expected_after = build(False, **options)
    assert not has_deferred(found) and torch.equal(after, expected_after)
    # Buffers are computed whole (30 elements at most), of parameters only this rank's part.
    assert 0 < max(whole) <= 30, whole
    pairs = list(zip(found.named_parameters(), expected.named_parameters(), strict=True))
    assert len(pairs) == 9
    for (name, ours), (_, theirs) in pairs:
        assert ours.placements == theirs.placements and torch.equal(local_of(ours), local_of(theirs)), name
    for (name, ours_), (_, theirs_) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        assert type(ours_) is torch.Tensor and torch.equal(ours_, theirs_), name
    x = torch.arange(11)
    losses = []
    for model in (found, expected):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert found.head.weight is found.embed.weight
    assert torch.equal(full(found.embed.weight), full(expected.embed.weight))


def other_seeds_are_refused() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    with deferred_init():
        model = Model()
    with pytest.raises(RuntimeError, match="expected the same model and seed on every rank"):
        fully_shard(model, mesh=mesh_of())
    assert has_deferred(model)


def test_on_ranks(ranks: RankPools) -> None:
    ranks.run(run_cases, same_as_plain_construction, [(None,), (0,), (1,)], world_size=3)
    ranks.run(other_seeds_are_refused, world_size=3)
