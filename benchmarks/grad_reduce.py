"""Gradient reduction: collectives, bytes and wall time against stock DTensor's own and against DDP.

    python benchmarks/grad_reduce.py [--only stock,ddp] [--repeats 9]

Runs gloo processes on this machine. Timings are medians of steps; the sides take turns, so that the load of the machine
hits all of them; the ratio is what counts. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from vescale import GradientReducer
from vescale.comm import record_comms
from vescale.placements import from_local

NUM_LAYERS = 32
NUM_UNCOUNTED, NUM_COUNTED = 2, 4  # steps of a turn


class Arrive(torch.autograd.Function):
    """A gradient of a parameter, as it would arrive from backward: made before, and handed over."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return ctx.gradients.pop(), None


def layer_shapes(hidden: int) -> list[tuple[int, ...]]:
    """The parameters of one decoder layer."""
    return [(hidden,), *[(hidden, hidden)] * 4, (hidden,), *[(2 * hidden, hidden)] * 2, (hidden, 2 * hidden)]


def alternate(
    sides: dict[str, Callable[[], None]], repeats: int, prepare: Callable[[str], None] = lambda name: None
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each side, and its median of CPU seconds in this rank's threads, the ranks starting together after
    ``prepare``. The sides take turns of a few steps, of which the first ones, that find the caches as another side has left
    them, are not counted: who trains does so with one of them."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu_times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name, side in sides.items():
            for place in range(NUM_UNCOUNTED + NUM_COUNTED):
                prepare(name)
                dist.barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                side()
                if number and place >= NUM_UNCOUNTED:
                    times[name].append(time.perf_counter() - start)
                    cpu_times[name].append(time.process_time() - cpu_start)
    return _medians(times), _medians(cpu_times)


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def against_stock(hidden: int, repeats: int) -> dict[str, Any]:
    """The gradients of a 32-layer model, Partial over dp and tp: buckets, or one redistribution a tensor (and so one
    all-reduce a tensor and axis)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shapes = layer_shapes(hidden) * NUM_LAYERS
    module = nn.Module()
    for index, shape in enumerate(shapes):
        module.register_parameter(f"p{index}", nn.Parameter(from_local(torch.zeros(shape), mesh, [Replicate()] * 2)))
    parameters = list(module.parameters())
    torch.manual_seed(dist.get_rank())
    contributions = [torch.randn(shape) for shape in shapes]
    stock_parameters, bare_parameters = ([nn.Parameter(p.detach()) for p in parameters] for _ in range(2))
    reducer = GradientReducer(module, mesh)
    owners = {"stock": stock_parameters, "buckets": parameters, "backward": bare_parameters}
    losses: dict[str, torch.Tensor] = {}

    def prepare(name: str) -> None:
        for parameter in owners[name]:
            parameter.grad = None
        gradients = [[from_local(local.clone(), mesh, [Partial()] * 2)] for local in contributions]
        losses[name] = torch.stack([Arrive.apply(p, g) for p, g in zip(owners[name], gradients)]).sum()

    def stock() -> None:
        losses["stock"].backward()
        for parameter in stock_parameters:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            reduced = gradient.redistribute(placements=[Replicate()] * 2)
            parameter.grad = DTensor.from_local(reduced.to_local(), mesh, [Replicate()] * 2, run_check=False)

    sides = {
        "stock": stock,
        "buckets": lambda: losses["buckets"].backward(),
        "backward": lambda: losses["backward"].backward(),
    }
    medians, _ = alternate(sides, repeats, prepare)
    prepare("buckets")
    with record_comms() as ledger:
        losses["buckets"].backward()
    for own, other in zip(parameters, stock_parameters):
        torch.testing.assert_close(own.grad.to_local(), other.grad.to_local())
    assert len(ledger.records) == reducer.num_buckets
    total = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    return {
        "figure": f"{NUM_LAYERS} layers of width {hidden}, Partial over dp=2 x tp=2, against stock DTensor",
        "megabytes": round(total / 1e6, 1),
        "tensors": len(shapes),
        "collectives": len(ledger.records),
        "bytes": ledger.bytes(),
        "fused_bound": 2 * total * 3 // 4,
        "per_axis_bytes": 2 * total,
        "stock_ms": round(1e3 * medians["stock"], 1),
        "buckets_ms": round(1e3 * medians["buckets"], 1),
        "backward_alone_ms": round(1e3 * medians["backward"], 1),
        "speedup": round(medians["stock"] / medians["buckets"], 2),
    }


def against_ddp(hidden: int, batch: int, repeats: int) -> dict[str, Any]:
    """A step of a pure data-parallel model: forward, backward, optimizer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(16)]
        return nn.Sequential(*layers)

    models = {"ddp": DistributedDataParallel(build()), "buckets": build()}
    models["ddp_views"] = DistributedDataParallel(build(), gradient_as_bucket_view=True)
    GradientReducer(models["buckets"], mesh)
    x = torch.randn(batch, hidden, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in models.values():
        model(x).square().mean().backward()
    for a, b in zip(
        models["buckets"].parameters(), models["ddp"].parameters()
    ):  # later the two drift apart by rounding
        torch.testing.assert_close(a.grad, b.grad)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        models[name](x).square().mean().backward()
        optimizers[name].step()

    wall, cpu = alternate({name: functools.partial(step, name) for name in models}, repeats)
    return {
        "figure": f"step of a data-parallel model of width {hidden}, batch {batch}, against DDP",
        **{f"{name}_ms": round(1e3 * wall[name], 1) for name in models},
        "ratio": round(wall["buckets"] / wall["ddp"], 3),
        "ratio_to_views": round(wall["buckets"] / wall["ddp_views"], 3),
        "cpu_ratio": round(cpu["buckets"] / cpu["ddp"], 3),
        "cpu_ratio_to_views": round(cpu["buckets"] / cpu["ddp_views"], 3),
    }


def run(rank: int, world_size: int, store: str, only: list[str], repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    figures: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("stock", lambda: against_stock(16, repeats)),
        ("stock", lambda: against_stock(256, repeats)),
        ("ddp", lambda: against_ddp(64, 32, 6 * repeats)),
        ("ddp", lambda: against_ddp(512, 64, 2 * repeats)),
    ]
    for name, figure in figures:
        if name in only:
            found = figure()
            if rank == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="stock,ddp", help="figures, joined with commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--world-size", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(run, (args.world_size, store, args.only.split(","), args.repeats), nprocs=args.world_size)


if __name__ == "__main__":
    main()
