"""On a device the host does not wait in a collective, so that another thread looks in its place: ranks that wait for each
other in different collectives are told so, and end, long before the time limit of their process group."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.compiler import needs_compiler
from tests.debug.jobs import run_processes
from tests.device import BACKEND, DEVICE, build, register
from vescale.fsdp import fully_shard

pytestmark = [needs_compiler, pytest.mark.waits]


def train(mistake: str) -> None:
    """What rank 1 does in the seventh step."""
    register()
    dist.init_process_group(f"cpu:gloo,{DEVICE}:{BACKEND}")
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (2,))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]).to(DEVICE)
    for block in (*model, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 8, device=DEVICE)
    for step in range(9):
        now = mistake if step == 6 and dist.get_rank() == 1 else ""
        if now == "freezes a block":
            model[1].requires_grad_(False)
        if now == "one more forward":
            model(x)
        if now == "comes late":
            time.sleep(8)
        loss = (model[2](model[0](x)) if now == "leaves a block out" else model(x)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("freezes a block", r"rank 0 in a reduction of 1 .* rank 1 in a \w+ of 0 "),
        pytest.param(
            "one more forward", r"rank 0 in a gather of 2 .* rank 1 in a gather of 0 ", marks=pytest.mark.slow
        ),
        pytest.param(
            "leaves a block out", r"rank 0 in a gather of 1 .* rank 1 in a gather of 2 ", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_in_different_collectives(tmp_path: Path, mistake: str, text: str) -> None:
    build()
    job = run_processes(train, tmp_path, mistake, world_size=2, limit=60.0)
    assert job.codes == [1, 1], job.text
    for output in job.outputs:
        assert re.search(f"OrderMismatchError: .*they wait for each other, {text}", output), job.text


@pytest.mark.slow
def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    build()
    job = run_processes(train, tmp_path, "comes late", world_size=2, limit=60.0)
    assert job.codes == [0, 0], job.text
