"""A job that hangs ends within its timeout, on every rank, with a sentence that names the rank, the collective and
the module."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.debug.jobs import run_job, run_processes
from vescale import Plan, parallelize
from vescale.debug import hang_report
from vescale.fsdp import fully_shard

pytestmark = pytest.mark.waits

TIMEOUT = 3.0
BAD = 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.before: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        self.before()
        return self.down(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def model_on_mesh() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = Plan(mesh).shard(r"blocks.\d+.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")
    return parallelize(Net(), plan)


def sleeps() -> None:
    time.sleep(60)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raises() -> None:
    raise ValueError("planted")


def leaves() -> None:
    raise SystemExit(3)


def in_forward(fault: Callable[[], None]) -> None:
    hang_report(TIMEOUT)
    model: Any = model_on_mesh()
    if dist.get_rank() == BAD:
        model.blocks[1].before = fault
    for _ in range(3):
        model(torch.ones(2, 6)).backward()


def in_user_code(fault: Callable[[], None]) -> None:
    with hang_report(TIMEOUT):
        for step in range(3):
            if step == 2 and dist.get_rank() == BAD:
                fault()
            dist.all_reduce(torch.ones(4))


def another_collective(_: Any) -> None:
    hang_report(TIMEOUT)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == BAD:
        dist.broadcast(torch.ones(4), BAD)
    dist.barrier()
    dist.all_reduce(torch.ones(4))
    time.sleep(60)


def in_a_reduce_scatter(fault: Callable[[], None]) -> None:
    """Whose works on gloo never tell that they have ended."""
    hang_report(TIMEOUT)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == BAD:
        fault()
    dist.reduce_scatter_single(torch.ones(2), torch.ones(2 * dist.get_world_size()))


def in_a_gathered_buffer(fault: Callable[[], None]) -> None:
    """Whose forwards are compared before the gathers, whose messages tell nobody but when they are waited for."""
    hang_report(TIMEOUT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = fully_shard(Net(), mesh=mesh)
    model(torch.ones(2, 6)).backward()
    if dist.get_rank() == BAD:
        fault()
    model(torch.ones(2, 6)).backward()


def busy_after_a_reduce_scatter() -> None:
    with hang_report(TIMEOUT):
        dist.reduce_scatter_single(torch.ones(2), torch.ones(2 * dist.get_world_size()))
        time.sleep(TIMEOUT + 2.0)
        dist.barrier()


def in_item(fault: Callable[[], None]) -> None:
    """The value of a pending loss, which not all ranks ask for."""
    hang_report(TIMEOUT)
    model_on_mesh()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    loss: Any = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    assert loss.item() == dist.get_world_size()
    if dist.get_rank() == BAD:
        fault()
    print(loss.item())


def in_a_stage(fault: Callable[[], None]) -> None:
    """Three stages in a row; of the second micro-batch the middle one does not send."""
    hang_report(TIMEOUT)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    net: Any = Net()
    net.blocks.append(Block())
    splits = ["blocks.1", "blocks.2"]
    model: Any = parallelize(net, Plan(mesh).pipeline(split_before=splits, microbatches=3, loss="out"))
    model.step(x=torch.ones(6, 6))
    count = 0

    def second() -> None:
        nonlocal count
        count += 1
        if count == 2 and dist.get_rank() == BAD:
            fault()

    model.blocks[1].before = second
    model.step(x=torch.ones(6, 6))


GONE = r"rank 1 (is dead|has reported nothing)"
CASES: list[tuple[Callable[[Any], None], Callable[[], None] | None, str]] = [
    (in_forward, sleeps, r"rank 1 did not enter all_reduce number \d+ of axis 'tp' \(\d+ bytes, requested by "
                         r"blocks.1.down.<out>"
     r".* ranks \[0, 2\] have waited for .* s: rank 1 is at .*test_hang_report.py:\d+ \(sleeps\) in forward of blocks.1"),
    (in_forward, dies, rf"by blocks.1.down.* {GONE}|{GONE}.* blocks.1"),
    (in_forward, stops, r"rank 1 did not enter all_reduce .* by blocks.1.down.* rank 1 is stopped by a signal .*; when it last reported"),  # noqa: E501
    (in_forward, raises, r"rank 1 has ended with ValueError: planted \(at .*test_hang_report.py:\d+ \(raises\) in forward of blocks.1\)"),  # noqa: E501
    (another_collective, None, r"rank 1 entered broadcast number 1 of ranks \[0, 1, 2\] .*, and ranks \[0, 2\] barrier number 1"),  # noqa: E501
    (in_user_code, sleeps, r"rank 1 did not enter all_reduce number 2 .* \(sleeps\)"),
    (in_item, sleeps, r"rank 1 did not enter a read of item\(\), a DTensor of shape \(\) placed as \(Partial\(sum\),\) .*number 2 .*\(in_item\).* \(sleeps\)"),  # noqa: E501
    (in_a_reduce_scatter, sleeps, r"rank 1 did not enter reduce_scatter number 1 .* \(sleeps\)"),
    (in_a_stage, sleeps, r"rank [02] has waited for rank 1 for .* s, in a (recv|send) over axis 'pp' \(requested by stage [02], micro-batch \d: (from|to) stage 1"  # noqa: E501
     r".*: rank 1 is at .*\(sleeps\) in forward of blocks.1 \(stage 1, micro-batch 1\)"),
    (in_a_gathered_buffer, sleeps, r"rank 1 did not enter forward 2 of Net, .* \(sleeps\)"),
]  # fmt: skip


@pytest.mark.parametrize(("work", "fault", "pattern"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_job_ends_with_a_sentence(tmp_path: Path, work: Any, fault: Any, pattern: str) -> None:
    job = run_job(work, tmp_path, fault)
    assert all(code not in (0, None) for code in job.codes), job.text
    said = "\n".join(job.outputs)
    assert re.search(pattern, said), job.text


def test_what_cannot_tell_that_it_has_ended_is_no_hang(tmp_path: Path) -> None:
    job = run_job(busy_after_a_reduce_scatter, tmp_path)
    assert job.codes == [0, 0, 0], job.text


def outlives_the_store(folder: str) -> None:
    """Rank 0 keeps the store and ends; rank 1 waits for rank 2, which waits for rank 1's end."""
    rank, port = int(os.environ["RANK"]), Path(folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".part").write_text(str(store.port))
        port.with_suffix(".part").rename(port)
    else:
        while not port.exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    pair = dist.new_group([1, 2])
    hang_report(TIMEOUT)
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        time.sleep(1.0)
        os._exit(0)
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=pair)
    while Path(f"/proc/{pids[1]}").exists():
        time.sleep(0.1)
    os._exit(0)


def test_a_rank_that_loses_the_store_while_it_hangs_tells_so(tmp_path: Path) -> None:
    job = run_processes(outlives_the_store, tmp_path, str(tmp_path), limit=90.0)
    assert job.codes == [0, 70, 0] and re.search("job's store has ended .*, and rank 1 waits", job.outputs[1]), job.text


def is_watched_before_it_begins(folder: str) -> None:
    hang_report(20, folder=folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    raise ValueError("planted")


def test_the_traceback_is_printed_of_a_job_watched_before_it_began(tmp_path: Path) -> None:
    """As with ``VESCALE_TIMEOUT`` and vescale imported at the top of the script: the hook of ``init_process_group``, which
    calls the watch's, prints only after the watch may have ended the process."""
    job = run_processes(is_watched_before_it_begins, tmp_path, str(tmp_path), world_size=1)
    assert job.codes == [70] and "[rank0]: ValueError: planted" in job.text, job.text
    assert "vescale: rank 0 has ended with ValueError: planted" in job.text
