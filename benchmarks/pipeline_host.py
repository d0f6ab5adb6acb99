"""What ``.step`` of a pipeline costs the host, over running the stage's modules by hand with the same messages.

The process group is fake (messages and collectives do nothing), and the model small, so that only the host's work shows. The
process is the first of two ranks, with half of the blocks, and runs all micro-batches forward, then all backward (GPipe):

* ``hand``: the blocks, parallelized by the same entries without a pipeline, called one after the other; what they make is
  sent, a gradient is received, ``backward()``; gradients are reduced once, with the last micro-batch;
* ``step``: ``parallelize`` with the pipeline, and ``.step``.

PYTHONPATH=. python -m benchmarks.pipeline_host [--blocks 8] [--width 64] [--microbatches 8] [--repeat 15] [--profile]

Times are processor time, interleaved pairs, medians.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale import Plan, parallelize
from vescale.runtime import no_sync

PP, TP = 2, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """``with_end``: the norm, the head and the loss; without, the first stage alone."""

    def __init__(self, width: int, blocks: int, with_end: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        if with_end:
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.with_end = with_end

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if not self.with_end:
            return x
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def entries(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    plan.shard(r"blocks.\d+.up.weight", Shard(0), mesh="tp").shard(r"blocks.\d+.up.bias", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d+.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d+.up.<in>", Replicate(), mesh="tp")
    return plan.shard(r"blocks.\d+.down.<out>", Replicate(), mesh="tp")


def run_by_hand(args: argparse.Namespace, mesh: DeviceMesh, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    model = parallelize(Net(args.width, args.blocks // 2, False), entries(mesh["tp"]))
    group, m = mesh.get_group("pp"), args.microbatches

    def message(op: Any, tensor: torch.Tensor) -> Any:
        return dist.batch_isend_irecv([dist.P2POp(op, tensor, group=group, group_peer=1)])

    def run() -> None:
        parts = {name: value.chunk(m) for name, value in batch.items()}
        made: list[DTensor] = []
        sent: list[Any] = []
        for number in range(m):
            out = model(**{name: part[number] for name, part in parts.items()})
            made.append(out)
            sent += message(dist.isend, out.to_local().detach())
        for number, out in enumerate(made):
            received = torch.empty(out.to_local().shape)
            for work in message(dist.irecv, received):
                work.wait()
            gradient = DTensor.from_local(received, out.device_mesh, out.placements, run_check=False)
            if number < m - 1:
                with no_sync(model):
                    torch.autograd.backward([out], [gradient])
            else:
                torch.autograd.backward([out], [gradient])
        for work in sent:
            work.wait()
        model.zero_grad()

    return run


def run_steps(args: argparse.Namespace, mesh: DeviceMesh, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    plan = entries(mesh).pipeline(
        split_before=[f"blocks.{args.blocks // 2}"], schedule="GPipe", microbatches=args.microbatches
    )
    model = parallelize(Net(args.width, args.blocks, True), plan)

    def run() -> None:
        model.step(**batch)
        model.zero_grad()

    return run


def agreeing_vote(tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    """What the other rank answers when stages compare what they know of shapes, in the first step."""
    tensor.fill_(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("blocks", 8), ("width", 64), ("microbatches", 8), ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--profile", action="store_true", help="print what .step spends its time in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=PP * TP)
    mesh = init_device_mesh("cpu", (PP, TP), mesh_dim_names=("pp", "tp"))
    ids = torch.randint(0, 256, (2 * args.microbatches, 8))
    batch = {"ids": ids, "labels": ids}
    ways = {"hand": run_by_hand(args, mesh, batch), "step": run_steps(args, mesh, batch)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with mock.patch.object(dist, "recv", agreeing_vote):
        for run in ways.values():
            run()
    for run in ways.values():
        run()
    for _ in range(args.repeat):
        for name, run in ways.items():
            begin = time.process_time()
            run()
            times[name].append(time.process_time() - begin)
    for name, found in times.items():
        print(f"{name}: {statistics.median(found) * 1e3:.2f} ms")
    ratios = [step / hand for step, hand in zip(times["step"], times["hand"], strict=True)]
    print(f"step / hand: {statistics.median(ratios):.3f}")
    if args.profile:
        profiler = cProfile.Profile()
        for _ in range(10):
            profiler.runcall(ways["step"])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
