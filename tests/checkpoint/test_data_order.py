"""A run that is interrupted in the middle of an epoch goes on with the batches and random numbers that it would have had."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.device import device_type
from tests.ranks import RankPools
from vescale.checkpoint import Checkpointer, load, save
from vescale.errors import CheckpointWarning
from vescale.rng import ShardedBatchSampler

DATA = list(range(50))


def sampler_of(generator: torch.Generator | None = None) -> ShardedBatchSampler:
    mesh = init_device_mesh(device_type(), (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    return ShardedBatchSampler(DATA, 8, mesh, "dp", shuffle=True, drop_last=True, generator=generator)


class Prefetching:
    """Draws batches before they are asked for, as a ``DataLoader`` with worker processes does (which ranks of a test,
    daemons, cannot start)."""

    def __init__(self, sampler: ShardedBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        drawn = iter(self.sampler)
        ahead = deque(itertools.islice(drawn, 3))
        while ahead:
            ahead.extend(itertools.islice(drawn, 1))
            yield ahead.popleft()


def gathered(rows: Any) -> list[int]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, [int(row) for row in rows])
    return [row for part in found for row in part]


def run(sampler: ShardedBatchSampler, steps: int, workers: int = 0) -> list[Any]:
    """(global batch, a random number) of each step, over several epochs; stops in the middle of one."""
    seen: list[Any] = []
    loader: Any = Prefetching(sampler) if workers else DataLoader(DATA, batch_sampler=sampler)
    while True:
        for batch in sampler.track(loader) if workers else loader:
            seen.append((gathered(batch), float(torch.rand(()))))
            if len(seen) == steps:
                return seen


def interrupted(folder: str, steps: int, workers: int, own: bool) -> None:
    torch.manual_seed(7)
    sampler = sampler_of(torch.Generator().manual_seed(3) if own else None)
    run(sampler, steps, workers)
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        checkpoints.save(steps, sampler=sampler)


def uninterrupted(steps: int, workers: int, own: bool) -> list[Any]:
    torch.manual_seed(7)
    return run(sampler_of(torch.Generator().manual_seed(3) if own else None), steps + 9, workers)


def resumed(folder: str, workers: int, own: bool) -> list[Any]:
    torch.manual_seed(1234)
    sampler = sampler_of(torch.Generator() if own else None)
    Checkpointer(folder).restore(sampler=sampler)
    return run(sampler, 9, workers)


@pytest.mark.parametrize(("steps", "workers", "own"), [(4, 0, False), (8, 0, True), (3, 2, False), (6, 0, False)])
def test_resume_in_an_epoch_on_another_mesh(
    ranks: RankPools, tmp_path: Path, steps: int, workers: int, own: bool
) -> None:
    expected = ranks.run(uninterrupted, steps, workers, own, world_size=2)[0]
    ranks.run(interrupted, str(tmp_path), steps, workers, own, world_size=2)
    for world in (2, 4):
        found = ranks.run(resumed, str(tmp_path), workers, own, world_size=world)[0]
        assert [batch for batch, _ in found] == [batch for batch, _ in expected[steps:]]
        assert found == expected[steps:]


def test_between_epochs_nothing_is_left_out(ranks: RankPools) -> None:
    ranks.run(end_epoch, world_size=2)


def end_epoch() -> None:
    sampler, other = sampler_of(), sampler_of()
    for workers in (0, 1):
        loader: Any = Prefetching(sampler) if workers else DataLoader(DATA, batch_sampler=sampler)
        for _ in sampler.track(loader) if workers else loader:
            pass
        other.load_state_dict(sampler.state_dict())
        assert len(list(other)) == len(other) == 6


def test_other_data_is_refused(ranks: RankPools) -> None:
    ranks.run(refuse, world_size=2)


def refuse() -> None:
    state = sampler_of().state_dict()
    with pytest.raises(ValueError, match="saved with batch_size=4"):
        sampler_of().load_state_dict(state | {"batch_size": 4})


def seeded_apart(folder: str) -> torch.Tensor:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(dist.get_rank())
    save(f"{folder}/one", model=nn.Linear(2, 2))
    return torch.rand(3, device="cpu")  # as the test process draws


def test_generators_that_differ_are_named(ranks: RankPools, tmp_path: Path) -> None:
    """On another number of ranks all continue with the first rank's numbers."""
    expected = ranks.run(seeded_apart, str(tmp_path), world_size=2)
    with pytest.warns(CheckpointWarning, match=r"2 ranks whose random states differ, the ones of random\.seed, and"):
        load(tmp_path / "one", model=nn.Linear(2, 2))
    assert torch.equal(torch.rand(3), expected[0])
