"""Ranks on several hosts, or on NCCL, do not wait for each other: descriptions are compared a forward later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import vescale
from tests.ranks import RankPools
from vescale import InputMismatchError
from vescale.agreement import Board
from vescale.checks import StepChecks
from vescale.runtime import Runtime


@contextmanager
def on_several_hosts() -> Iterator[None]:
    """Boards find that not all ranks are on one host."""
    found = Board.open
    Board.open = classmethod(lambda cls, *args: None)  # type: ignore[method-assign,assignment]
    os.environ["VESCALE_CHECK_EVERY"] = "4"
    try:
        yield
    finally:
        Board.open = found  # type: ignore[method-assign]
        del os.environ["VESCALE_CHECK_EVERY"]


def parallel(given: str = "global") -> tuple[nn.Module, StepChecks]:
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model = vescale.parallelize(nn.Linear(4, 2), plan.shard("<in>", Shard(0), given=given))  # type: ignore[arg-type]
    runtime = Runtime.of(model)
    assert runtime is not None and not runtime.checks.waits
    return model, runtime.checks


def steps(model: nn.Module, differs_at: int, number: int = 11) -> int:
    """The forward that raises; 0: none does."""
    for step in range(1, number + 1):
        dist.barrier()  # the ranks are about as far: what they have put is there
        x = torch.full((4, 4), float(step + (dist.get_rank() if step == differs_at else 0)))
        try:
            model(x).sum().backward()
        except InputMismatchError as error:
            assert f"the input 'input' of forward {differs_at} of Linear" in str(error) and "rank 1" in str(error)
            return step
    return 0


def later() -> None:
    with on_several_hosts():
        for differs_at in (1, 3, 8):  # 8: every fourth is compared
            model, _ = parallel()
            raised = steps(model, differs_at)
            assert raised == differs_at + 1, (differs_at, raised)
            dist.barrier()
        model, checks = parallel()
        assert steps(model, 0) == 0 and not checks._handed_in
        model, _ = parallel()
        assert steps(model, 6) == 0  # between the compared ones: documented as not seen
        dist.barrier()


def parts() -> None:
    """Parts of other sizes are an error a step later: ranks have taken them as equal."""
    with on_several_hosts():
        model, _ = parallel("local")
        rows = 2 + dist.get_rank()
        model(torch.ones(rows, 4))
        dist.barrier()
        with pytest.raises(InputMismatchError, match=r"different sizes in forward 1 of Linear.*VESCALE_CHECK=steps"):
            model(torch.ones(rows, 4))
        dist.barrier()


def test_differences_are_reported_by_the_next_forward(ranks: RankPools) -> None:
    ranks.run(later, world_size=2)


def test_parts_of_different_sizes(ranks: RankPools) -> None:
    ranks.run(parts, world_size=2)
