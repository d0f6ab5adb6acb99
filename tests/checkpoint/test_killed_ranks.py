"""A rank of two is killed while both save: the last good step stays, and the other rank ends with an error."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.killing import filled, model_of
from tests.checkpoint.test_crashes import check, counting, kill_at
from vescale.checkpoint import Checkpointer, CheckpointError

pytestmark = pytest.mark.waits

_WAIT = 2  # seconds that a rank waits for the others


def rank_of_two(folder: Path, rank: int, victim: int, point: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}.store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_WAIT),
    )
    if rank == victim:
        counting(kill_at(point))
    try:
        with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
            checkpoints.save(3, model=model_of(3))
    except CheckpointError as error:
        Path(f"{folder}.error").write_text(str(error))
        os._exit(3)
    os._exit(0)


def status_of(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} was still there after the time that a rank waits for the others")


@pytest.mark.parametrize(("victim", "point"), [(0, 2), (0, 9), (1, 2)])
def test_a_rank_is_killed(tmp_path: Path, victim: int, point: int) -> None:
    folder = filled(tmp_path / "run")
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                rank_of_two(folder, rank, victim, point)
            finally:
                os._exit(1)
        pids.append(pid)
    deadline = time.monotonic() + 5 * _WAIT + 5
    statuses = [status_of(pid, deadline) for pid in pids]
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] == 3, statuses
    assert str(folder) in Path(f"{folder}.error").read_text()
    check(folder, {2, 3})
