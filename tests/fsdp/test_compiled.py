"""torch.compile of blocks before they are sharded, as training scripts do, and of the sharded model: FSDP2's losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from tests.fsdp.compare import data, mesh_of
from tests.ranks import RankPools, run_cases
from vescale.fsdp import fully_shard

ORDERS = ("in place", "wrapped", "afterwards")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def losses(shard: Any, order: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Block(), Block(), nn.Linear(6, 3))
    for index in (0, 1):
        if order == "in place":
            model[index].compile(backend="aot_eager")
        if order == "wrapped":
            model[index] = torch.compile(model[index], backend="aot_eager")
        shard(model[index], mesh=mesh_of())
    shard(model, mesh=mesh_of())
    run = torch.compile(model, backend="aot_eager") if order == "afterwards" else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(3):
        loss = run(data((4, 6), step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def same(order: str) -> None:
    for own, stock in zip(losses(fully_shard, order), losses(stock_fully_shard, order), strict=True):
        torch.testing.assert_close(own, stock, rtol=1e-6, atol=0)


def compiled() -> int:
    return run_cases(same, [(order,) for order in ORDERS])


def test_compiled_models(ranks: RankPools) -> None:
    assert set(ranks.run(compiled, world_size=2)) == {len(ORDERS)}
