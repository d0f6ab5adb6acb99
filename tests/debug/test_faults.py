"""Faults injected into jobs: each ends within its timeout, non-zero on every rank, and names the rank and the module."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.debug.jobs import run_job
from tests.debug.test_hang_report import Net, dies, raises, sleeps, stops
from vescale import Plan, parallelize
from vescale.debug import hang_report
from vescale.fsdp import fully_shard

pytestmark = pytest.mark.waits

TIMEOUT = 4.0  # a loaded machine may take seconds for the first ops of a rank
BAD = 1


def spins() -> None:
    while True:
        time.sleep(0)


_MESSAGE = torch.empty(1)  # not made in a forward: there it would be a DTensor, which recv refuses


def waits_for_others() -> None:
    dist.recv(_MESSAGE, 0)


def leaves() -> None:
    os._exit(3)


def is_bad() -> bool:
    return dist.get_rank() == BAD


def planned(dim: int = 0, dtype: torch.dtype = torch.float32, swapped: bool = False, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    plan = Plan(mesh).shard(r"blocks.\d+.up.weight", Shard(dim), mesh="tp")
    if dim == 0:
        plan.shard(r"blocks.\d+.up.bias", Shard(0), mesh="tp").shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp")
    plan.shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")
    model = Net().to(dtype)
    if swapped:
        model.blocks[0]._modules = dict(reversed(model.blocks[0]._modules.items()))
    return parallelize(model, plan)


def train(model: nn.Module, num_steps: int = 3) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).backward()
        optimizer.step()
    return optimizer


def another_plan(_: Any) -> None:
    planned(dim=1 if is_bad() else 0)


def another_dtype(_: Any) -> None:
    planned(dtype=torch.float64 if is_bad() else torch.float32)


def another_order(_: Any) -> None:
    planned(swapped=is_bad())


def another_seed(_: Any) -> None:
    planned(seed=int(is_bad()))


def before_parallelize(fault: Callable[[], None]) -> None:
    os.environ["VESCALE_TIMEOUT"] = str(TIMEOUT)
    if is_bad():
        fault()
    planned()


def in_forward(fault: Callable[[], None]) -> None:
    model = planned()
    if is_bad():
        model.blocks[1].before = fault
    train(model)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Any) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.fault()
        return grad, None


def in_backward(fault: Callable[[], None]) -> None:
    model = planned()
    if is_bad():
        up = model.blocks[1].up
        original = up.forward
        up.forward = lambda x: original(_InBackward.apply(x, fault))
    train(model)


def in_optimizer(fault: Callable[[], None]) -> None:
    model = planned()
    optimizer = train(model, 1)
    if is_bad():
        optimizer.register_step_pre_hook(lambda *_: fault())
    for _ in range(2):
        model(torch.ones(2, 6)).backward()
        optimizer.step()


class _Writer(dcp.FileSystemWriter):
    fault: Any = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.fault is not None:
            self.fault()
        return super().write_data(plan, planner)


def in_checkpoint(fault: Callable[[], None]) -> None:
    model = planned()
    train(model, 1)
    writer = _Writer(os.path.join(os.environ["VESCALE_REPORTS"], "checkpoint"))
    writer.fault = fault if is_bad() else None
    dcp.save(model.state_dict(), storage_writer=writer)
    train(model)


def in_fully_shard(fault: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train(model, 1)
    if is_bad():
        model.blocks[1].before = fault
    train(model)


def in_ddp(fault: Callable[[], None]) -> None:
    model = Net()
    if is_bad():
        model.blocks[1].before = fault
    train(nn.parallel.DistributedDataParallel(model))


def a_skipped_step(_: Any) -> None:
    train(planned(), 2 if is_bad() else 3)
    time.sleep(60)


def one_more_collective(_: Any) -> None:
    train(planned(), 1)
    if is_bad():
        dist.all_reduce(torch.ones(7))
    train(planned(), 1)


AT = r".*test_faults.py:\d+"
SLEEPS = r"rank 1 did not enter .* rank 1 is at .*\(sleeps\)"
RAISED = r"rank 1 has ended with ValueError: planted \(at .*\(raises\)"
GONE = r"rank 1 (is dead|has reported nothing)"
ALL: list[tuple[Callable[[Any], None], Callable[[], None] | None, str]] = [
    (another_plan, None, r"PlanMismatchError: .*'shard .*blocks.*up.weight' of plan is .* on rank 1"),
    (another_dtype, None, r"PlanMismatchError: .*'blocks.0.up.weight' of parameters .* float64 on rank 1"),
    (another_order, None, r"PlanMismatchError: .*blocks.0.up.weight on ranks \[0, 2\] and blocks.0.down.weight on rank 1"),
    (another_seed, None, r"PlanMismatchError: .*blocks.0.up.weight has other values.* on rank 1"),
    (before_parallelize, sleeps, r"PlanMismatchError: parallelize\(Net, plan\); ranks \[1\] did not arrive"),
    (before_parallelize, raises, RAISED),
    (before_parallelize, stops, r"rank 1 .*is stopped by a signal|ranks \[1\] did not arrive"),
    (in_forward, sleeps, SLEEPS + " in forward of blocks.1"),
    (in_forward, spins, r"rank 1 did not enter .* rank 1 is at .*\(spins\) in forward of blocks.1"),
    (in_forward, raises, RAISED + " in forward of blocks.1"),
    (in_forward, dies, GONE + r".* in forward of blocks.1|by blocks.1.down.* " + GONE),
    (in_forward, stops, r"rank 1 did not enter .* by blocks.1.down.* rank 1 is stopped by a signal"),
    (in_forward, leaves, GONE + r".* in forward of blocks.1|by blocks.1.down.* " + GONE),
    (in_forward, waits_for_others, r"rank 1 did not enter .*blocks.1.down.*\(waits_for_others\) in forward of blocks.1"),
    (in_backward, sleeps, SLEEPS + " in backward"),
    (in_backward, raises, RAISED + " in backward of blocks.1.up"),
    (in_backward, dies, r"rank 1 (is dead|has reported nothing).* in backward"),
    (in_optimizer, sleeps, r"rank 1 did not enter forward 3 of Net.* rank 1 is at .*\(sleeps\) in optimizer"),
    (in_optimizer, raises, RAISED + " in optimizer"),
    (in_checkpoint, sleeps, SLEEPS + " in checkpoint"),
    (in_checkpoint, dies, r"rank 1 (is dead|has reported nothing)"),
    (in_fully_shard, sleeps, SLEEPS + " in forward of blocks.1"),
    (in_fully_shard, raises, RAISED + " in forward of blocks.1"),
    (in_ddp, sleeps, SLEEPS + " in forward of"),
    (in_ddp, stops, r"rank 1 .* is stopped by a signal"),
    (a_skipped_step, None, r"rank 1 did not enter forward 3 of Net.* rank 1 is at .*\(a_skipped_step\)"),
    (one_more_collective, None, r"ranks \[0, 2\] did not enter all_reduce .*\(one_more_collective\)\), in which rank 1 has waited"),  # noqa: E501
]  # fmt: skip
# In every run; the others at night.
SAMPLE = {
    (another_plan, None), (in_forward, raises), (in_forward, stops), (in_backward, raises), (in_optimizer, sleeps),
    (in_checkpoint, dies), (in_fully_shard, sleeps), (in_ddp, sleeps), (a_skipped_step, None),
}  # fmt: skip


def name_of(work: Any, fault: Any) -> str:
    return work.__name__ + (f"-{fault.__name__}" if fault is not None else "")


def run(work: Any, fault: Any) -> None:
    hang_report(TIMEOUT)
    work(fault)


@pytest.mark.parametrize(
    ("work", "fault", "pattern"),
    [
        pytest.param(*case, id=name_of(*case[:2]), marks=[] if case[:2] in SAMPLE else [pytest.mark.slow])
        for case in ALL
    ],
)
def test_a_fault_ends_the_job_and_is_named(tmp_path: Path, work: Any, fault: Any, pattern: str) -> None:
    job = run_job(run, tmp_path, work, fault)
    assert all(code not in (0, None) for code in job.codes), job.text
    assert re.search(pattern, "\n".join(job.outputs)), job.text
