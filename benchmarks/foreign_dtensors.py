"""What DTensors of other code pay after `parallelize` of some model: stock ops on unrelated DTensors, before and after.

Each op runs in two processes: one that never imports vescale, and one that has parallelized and run a small model, on a mesh
of its own. The processes take turns, op by op, so that both meet the same load. For each op the median CPU time of each
process is taken over the rounds, and their ratio over several pairs of processes. The process group is fake (collectives
return at once), so that only the host's work shows.

python benchmarks/foreign_dtensors.py [--pairs 5] [--rounds 15] [--calls 40] [--only clone,where]

Fails if the median ratio is above 1.03, or the ratio of an op above 1.10.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

MEDIAN_LIMIT, OP_LIMIT = 1.03, 1.10


def ops(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Ops on DTensors that are sharded, replicated or pending, as stock DTensor runs them."""
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    y = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0)])
    r = distribute_tensor(torch.randn(8, 16), mesh, [Replicate()])
    square = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()])
    pending = DTensor.from_local(torch.randn(8, 16), mesh, [Partial()])
    scalar = distribute_tensor(torch.randn(()), mesh, [Replicate()])
    mask = distribute_tensor(torch.randn(8, 16) > 0, mesh, [Shard(0)])
    labels = distribute_tensor(torch.randint(16, (8,)), mesh, [Replicate()])
    rows = distribute_tensor(torch.randint(8, (4,)), mesh, [Replicate()])
    table = distribute_tensor(torch.randn(32, 16), mesh, [Replicate()])
    image = distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [Replicate()])
    kernel = distribute_tensor(torch.randn(4, 4, 3, 3), mesh, [Replicate()])
    z = distribute_tensor(torch.zeros(8, 16), mesh, [Shard(0)])
    leaf = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()]).requires_grad_()

    def backward() -> None:
        (r @ leaf).sum().backward()
        leaf.grad = None

    return {
        "add": lambda: x + y,
        "add scalar": lambda: x + 1.0,
        "add_": lambda: z.add_(y),
        "addmm": lambda: torch.addmm(square, square, square),
        "amax": lambda: r.amax(-1),
        "argmax": lambda: r.argmax(-1),
        "backward": backward,
        "bmm": lambda: torch.bmm(image.view(8, 8, 8), image.view(8, 8, 8)),
        "cat": lambda: torch.cat([x, y], 1),
        "chunk": lambda: x.chunk(2, 1),
        "clone": lambda: x.clone(),
        "conv2d": lambda: F.conv2d(image, kernel, padding=1),
        "copy_": lambda: z.copy_(y),
        "cross_entropy": lambda: F.cross_entropy(r, labels),
        "detach": lambda: x.detach(),
        "div": lambda: x / y,
        "embedding": lambda: F.embedding(rows, table),
        "empty_like": lambda: torch.empty_like(x),
        "exp": lambda: x.exp(),
        "expand": lambda: scalar.expand(8, 16),
        "fill_": lambda: z.fill_(0.5),
        "foreach_add": lambda: torch._foreach_add([x, y, z], 1.0),
        "from_local": lambda: DTensor.from_local(z._local_tensor, mesh, [Shard(0)]),
        "full_tensor": lambda: x.full_tensor(),
        "gather": lambda: r.gather(1, labels.view(8, 1)),
        "gelu": lambda: F.gelu(x),
        "index_select": lambda: r.index_select(0, rows),
        "item": lambda: scalar.item(),
        "layer_norm": lambda: F.layer_norm(x, (16,)),
        "linear": lambda: F.linear(x, square),
        "log_softmax": lambda: F.log_softmax(x, -1),
        "masked_fill_": lambda: z.masked_fill_(mask, 0.5),
        "matmul": lambda: r @ square,
        "mean": lambda: x.mean(-1),
        "mse_loss": lambda: F.mse_loss(r, r),
        "mul": lambda: x * y,
        "mul scalar": lambda: x * 2.0,
        "ones_like": lambda: torch.ones_like(x),
        "permute": lambda: image.permute(0, 2, 3, 1),
        "redistribute": lambda: x.redistribute(mesh, [Replicate()]),
        "redistribute to shards": lambda: r.redistribute(mesh, [Shard(0)]),
        "redistribute pending": lambda: pending.redistribute(mesh, [Replicate()]),
        "select": lambda: x[:, 0],
        "silu": lambda: F.silu(x),
        "softmax": lambda: x.softmax(-1),
        "split": lambda: x.split(4, 1),
        "stack": lambda: torch.stack([x, y]),
        "sum": lambda: x.sum(),
        "to_local": lambda: x.to_local(),
        "transpose": lambda: x.t(),
        "view": lambda: x.view(8, 4, 4),
        "where": lambda: torch.where(mask, x, y),
        "zero_": lambda: z.zero_(),
    }


def parallelized(mesh: DeviceMesh) -> object:
    """Some model, after a training step."""
    from torch import nn

    from vescale import Plan, parallelize

    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    plan = Plan(mesh)
    plan.shard("0.(weight|bias)", Shard(0), mesh="tp")
    plan.shard("2.weight", Shard(1), mesh="tp")
    parallelize(model, plan)
    model(torch.randn(3, 6)).square().mean().backward()
    return model


def serve(connection: Connection, with_model: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    kept = parallelized(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))) if with_model else None
    known = ops(init_device_mesh("cpu", (2,)))
    assert with_model == ("vescale" in sys.modules)
    for run in known.values():
        for _ in range(3):
            run()
    gc.collect()
    gc.freeze()  # so that what is collected between two measurements is little
    gc.disable()
    connection.send(list(known))
    while (order := connection.recv()) is not None:
        name, calls = order
        run = known[name]
        start = time.thread_time_ns()
        for _ in range(calls):
            run()
        connection.send((time.thread_time_ns() - start) / calls / 1e3)
        gc.collect()
    del kept


def measure(rounds: int, calls: int, only: set[str]) -> dict[str, tuple[float, float]]:
    """Median microseconds of each op in a process without a model, and in one with it."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=serve, args=(pipe[1], bool(i)), daemon=True) for i, pipe in enumerate(pipes)]
    for worker in workers:
        worker.start()
    ends = [pipe[0] for pipe in pipes]
    known = [end.recv() for end in ends]
    names = [name for name in known[0] if not only or name in only]
    found = {}
    for name in names:
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for i in (0, 1) if number % 2 else (1, 0):
                ends[i].send((name, calls))
                times[i].append(ends[i].recv())
        found[name] = (statistics.median(times[0]), statistics.median(times[1]))
    for end, worker in zip(ends, workers):
        end.send(None)
        worker.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=set())
    args = parser.parse_args()
    pairs = [measure(args.rounds, args.calls, args.only) for _ in range(args.pairs)]
    ratios = {}
    print(f"{'op':22} {'before us':>10} {'after us':>10} {'ratio':>7}")
    for name in pairs[0]:
        before, after = (statistics.median(pair[name][i] for pair in pairs) for i in (0, 1))
        ratios[name] = statistics.median(pair[name][1] / pair[name][0] for pair in pairs)
        print(f"{name:22} {before:10.1f} {after:10.1f} {ratios[name]:7.3f}")
    middle = statistics.median(ratios.values())
    slow = {name: round(ratio, 3) for name, ratio in ratios.items() if ratio > OP_LIMIT}
    print(f"\nmedian of {len(ratios)} ops: {middle:.3f}; above {OP_LIMIT}: {slow or 'none'}")
    return 1 if middle > MEDIAN_LIMIT or slow else 0


if __name__ == "__main__":
    sys.exit(main())
