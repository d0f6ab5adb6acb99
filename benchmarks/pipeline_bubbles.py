"""Wall-clock time of a step under each schedule, on processes whose stages take a known time without using a processor.

Each block sleeps in its forward, in the half of its backward that computes gradients of inputs, and in the half that
computes those of parameters, so that any number of ranks fits on few cores, and what is left beside the sleeping is the
schedule's bubbles, messages and the host's work. The model, its values and its gradients are real. ``paper`` is the time of
the schedule without messages and host (a forward 1, the halves of a backward 1 each), ``ideal`` that without bubbles.

PYTHONPATH=. python -m benchmarks.pipeline_bubbles [--ranks 4] [--microbatches 8] [--milliseconds 15] [--repeat 5]

Rows are measured one after the other in one run, in turns; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale import Plan, parallelize
from vescale.pipeline import StagedProgram

WIDTH, BLOCKS = 8, 8
# name, stages on a rank
SCHEDULES = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("InterleavedZeroBubble", 2),
    ("ZBV", 2),
    ("DualPipeV", 2),
]


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class _Weight(torch.autograd.Function):
    """On the way from a product to its weight alone."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(_Input.apply(x, self.seconds), _Weight.apply(self.weight, self.seconds)).tanh()


class Net(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def plan_of(mesh: Any, ranks: int, name: str, per_rank: int, microbatches: int) -> Plan:
    each = BLOCKS // (ranks * per_rank)
    return Plan(mesh).pipeline(
        split_before=[f"blocks.{n}" for n in range(each, BLOCKS, each)],
        schedule=name,
        microbatches=microbatches,
        loss="out",
    )


def _run(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    batch = {"x": torch.ones(args.microbatches, WIDTH)}
    models = {}
    for name, per_rank in SCHEDULES:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("pp",))
        models[name] = parallelize(
            Net(args.milliseconds / 1e3), plan_of(mesh, args.ranks, name, per_rank, args.microbatches)
        )
        models[name].step(**batch)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.repeat):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            model.step(**batch)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "times").write_text(
            json.dumps({name: statistics.median(found) for name, found in times.items()})
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_run, (args, folder), nprocs=args.ranks)
        times = json.loads((Path(folder) / "times").read_text())
    ideal = 3 * BLOCKS // args.ranks * args.microbatches * args.milliseconds / 1e3
    print(f"{args.ranks} ranks, {args.microbatches} micro-batches, {args.milliseconds} ms; ideal {ideal:.3f} s")
    print(f"{'schedule':24}{'measured':>10}{'of 1F1B':>9}{'paper':>9}{'of 1F1B':>9}{'measured / paper':>18}")
    paper: dict[str, float] = {}
    for name, per_rank in SCHEDULES:
        schedule = StagedProgram.of(
            plan_of({"pp": args.ranks}, args.ranks, name, per_rank, args.microbatches), Net(0.0)
        ).schedule
        paper[name] = schedule.length * BLOCKS / (args.ranks * per_rank) * args.milliseconds / 1e3
    for name, _ in SCHEDULES:
        one, other = times[name], paper[name]
        shares = (
            f"{one:>9.3f}s{one / times['1F1B']:>9.2f}{other:>8.3f}s{other / paper['1F1B']:>9.2f}{one / other:>18.2f}"
        )
        print(f"{name:24}{shares}")


if __name__ == "__main__":
    main()
