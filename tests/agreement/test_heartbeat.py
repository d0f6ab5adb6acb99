"""Heartbeats of ``fully_shard``: what ranks compare in each step, which nobody waits for after the first steps."""

from __future__ import annotations

import atexit
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.debug.jobs import run_job
from tests.fsdp.test_gather_order import EQUAL, X, made, raises_alike
from tests.ranks import RankPools
from vescale.agreement import Heartbeat
from vescale.agreement import _heartbeat as heartbeats
from vescale.checkpoint import Checkpointer
from vescale.comm import record_comms
from vescale.gradients import FLAGS_REQUESTER

ORDER = "which units were gathered"


def answers() -> list[int]:
    """What a rank waits for from now on: the lengths of messages."""
    found: list[int] = []
    answer = heartbeats.Beat.answer

    def noted(beat: heartbeats.Beat) -> list[int]:
        if beat._pending is not None:
            found.append(len(answer(beat)))
        return answer(beat)

    heartbeats.Beat.answer = noted  # type: ignore[method-assign]
    return found


def steady() -> None:
    model, _ = made(EQUAL)
    for _ in range(3):
        model(X, (0,)).backward()
    found = answers()
    for _ in range(3):  # only what was sent a step before is read
        before = len(found)
        model(X, (0,)).backward()
        assert len(found) - before <= 1
    with record_comms() as ledger:
        model(X, (0,)).backward()
    assert [record.requester for record in ledger.records if record.requester in (FLAGS_REQUESTER, ORDER)] == [
        FLAGS_REQUESTER
    ]
    model.set_requires_gradient_sync(False)
    for _ in range(3):  # the first three are compared at once
        model(X, (0,)).backward()
    with record_comms() as ledger:
        model(X, (0,)).backward()
    assert not [record for record in ledger.records if record.requester in (FLAGS_REQUESTER, ORDER)]


def test_a_steady_step_sends_one_message_and_waits_for_none(ranks: RankPools) -> None:
    ranks.run(steady, world_size=2)


def evaluates() -> None:
    model, _ = made(EQUAL)
    rank = dist.get_rank()
    with torch.no_grad():
        for _ in range(3):
            model(X, (0,))
        model(X, (rank,))
        raises_alike(lambda: model(X, (0,)), "experts.0 on rank 0", "experts.1 on rank 1")
        model(X, (1,))


def saves(folder: str) -> None:
    model, _ = made(EQUAL)
    rank = dist.get_rank()
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        for _ in range(3):
            model(X, (0,)).backward()
        checkpoints.save(1, model=model)
        model(X, (rank,)).backward()
        raises_alike(lambda: checkpoints.save(2, model=model), "experts.0 on rank 0", "experts.1 on rank 1")
        assert checkpoints.steps() == [1]
        model(X, (0,)).backward()
        checkpoints.save(2, model=model)
        dist.barrier()
        assert checkpoints.steps() == [1, 2]


def test_evaluations_are_told_in_the_next_one(ranks: RankPools) -> None:
    ranks.run(evaluates, world_size=2)


def test_nothing_is_saved_of_a_step_in_which_ranks_disagreed(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(saves, str(tmp_path), world_size=2)


def ends(destroys: bool) -> None:
    model, _ = made(EQUAL)
    for _ in range(3):
        model(X, (0,)).backward()
    model(X, (dist.get_rank(),)).backward()
    del model
    if destroys:
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # as the interpreter does


@pytest.mark.slow
@pytest.mark.parametrize("destroys", [False, True])
def test_the_last_step_is_told_when_the_program_ends(tmp_path: Path, destroys: bool) -> None:
    result = run_job(ends, tmp_path, destroys, world_size=2)
    assert result.codes == [1, 1], result.text
    for output in result.outputs:
        assert "ranks have disagreed in the last step of the program" in output, result.text
        assert destroys or ("OrderMismatchError" in output and "experts.1" in output), result.text


def test_a_heartbeat_is_new_until_three_messages_were_sent() -> None:
    heartbeat = Heartbeat(None, "")  # type: ignore[arg-type]
    assert heartbeat.is_new
    heartbeat._num_sent = 3
    assert not heartbeat.is_new
    heartbeat.begin()
    assert heartbeat.is_new
