"""After the first forwards, ranks that wait for each other in different events find out while they wait, and all of them
raise; so does a rank that waits for one whose program has ended."""

from __future__ import annotations

import atexit
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale
from tests.debug.jobs import run_processes

pytestmark = pytest.mark.waits
SHARDED = {"dp": ["<in>"], "tp": ["0.weight", "0.bias"]}


def train(axis: str, mistake: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plan = vescale.Plan(init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)))
    for path in SHARDED[axis]:
        plan.shard(path, Shard(0))
    if axis == "tp":
        plan.shard("2.weight", Shard(1)).shard("2.<out>", Replicate())
    model = vescale.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)), plan)
    is_first = dist.get_rank() == 0
    for step in range(12):
        now = mistake if step == 6 else ""
        if now == "ends" and not is_first:
            atexit._run_exitfuncs()
            return
        if now == "raises" and not is_first:
            raise ValueError("planted")
        x = torch.full((4, 8), float(step))
        if now == "one more forward" and is_first:
            model(x).square().mean().item()
        loss = model(x).square().mean()
        if now == "no backward" and not is_first:
            continue
        loss.backward()
        if now == "a read" and is_first:
            next(model.parameters()).full_tensor()


CASES = [
    ("tp", "one more forward", r"rank 0 is before forward 7 .*; rank 1 is before forward 7 "),
    ("dp", "one more forward", r"rank 0 is before a read of item.*; rank 1 is before the backward of forward 7"),
    ("tp", "no backward", r"rank 0 is before the backward of forward 7 .*; rank 1 is before forward 8"),
    ("tp", "a read", r"rank 0 is before a read of full_tensor.*; rank 1 is before forward 8"),
]


@pytest.mark.parametrize(("axis", "mistake", "text"), CASES)
def test_ranks_in_different_events_raise(tmp_path: Path, axis: str, mistake: str, text: str) -> None:
    job = run_processes(train, tmp_path, axis, mistake, world_size=2, limit=60.0)
    assert all(job.codes), job.text
    for output in job.outputs:
        assert "StepMismatchError: ranks run different steps: " in output, job.text
        assert any(re.search(text, line) for line in output.splitlines()), job.text


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize(
    ("mistake", "text"), [("ends", "rank 1 has ended normally"), ("raises", "has failed, as where one")]
)
def test_a_rank_that_waits_for_one_that_has_ended(tmp_path: Path, axis: str, mistake: str, text: str) -> None:
    job = run_processes(train, tmp_path, axis, mistake, world_size=2, limit=60.0)
    assert job.codes[0] == 1 and "StepMismatchError: rank 0 is in " in job.outputs[0], job.text
    assert text in job.outputs[0], job.text
