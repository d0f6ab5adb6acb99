"""How often a rank asks the job's store, for what a program does: independently of the number of ranks, and never in steady
steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.agreement.test_round import CountingStore
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.agreement import _round
from vescale.checkpoint import Checkpointer
from vescale.fsdp import fully_shard

# The most of a rank: one may come and leave last in each round.
MOST = {
    "parallelize": 60,
    "fully_shard": 0,
    "first step": 90,
    "3 steps": 40,
    "5 steps": 0,
    "first save": 45,
    "save": 20,
}
MOST |= {"restore": 60}


def requests(folder: str) -> dict[str, int]:
    counting: list[CountingStore] = []
    found: dict[str, int] = {}

    def counted(make: Any) -> Any:
        def made() -> Any:
            counting.append(CountingStore(make()))
            return counting[-1]

        return made

    def mark(name: str) -> None:
        found[name] = sum(len(each.requests) for each in counting)
        counting.clear()
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("default_store", "own_connection"):
            patch.setattr(_round, name, counted(getattr(_round, name)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        counting.clear()
        parallelize(nn.Linear(4, 4), Plan(mesh))
        mark("parallelize")
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        mark("fully_shard")
        optimizer = torch.optim.AdamW(model.parameters())
        for number, name in ((1, "first step"), (3, "3 steps"), (5, "5 steps")):
            for _ in range(number):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                dist.barrier()
            mark(name)
        with Checkpointer(folder, asynchronous=False) as checkpoints:
            for step, name in enumerate(("first save", "save")):
                checkpoints.save(step, model=model, optimizer=optimizer)
                mark(name)
            checkpoints.restore(model=model, optimizer=optimizer)
            mark("restore")
    return found


def test_requests_of_a_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, means = RankPools(), []  # of its own: roots of other cases would be told apart, which asks more
    try:
        for world_size in (2, 4):
            folder = str(tmp_path_factory.mktemp("saves"))
            found = ranks.run(requests, folder, world_size=world_size)
            for own in found:
                assert all(number <= MOST[name] for name, number in own.items()), (world_size, own)
            means.append(sum(sum(own.values()) for own in found) / world_size)
    finally:
        ranks.close()
    assert means[1] <= 1.1 * means[0], means
