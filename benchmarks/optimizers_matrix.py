"""Optimizers that compute matrices whole: planned balance, host time of planning, and Muon's step against torch's.

python benchmarks/optimizers_matrix.py plan          # owners of Llama-3-8B, Qwen3-30B-A3B, GPT-OSS-120B, 8 to 1,024 ranks
python benchmarks/optimizers_matrix.py step [--ranks 4] [--side 192] [--matrices 16] [--rounds 5]

``plan`` needs no ranks. Parameters are cut evenly over the ranks, rows and stacks wherever the cut falls.

``step`` starts gloo processes with one thread each. Three take turns on equal parameters and gradients: Muon here; torch's
on whole tensors that every rank gathers and orthogonalizes; torch's on DTensors, whose products DTensor distributes with
collectives in each iteration. Wall time and CPU time of all ranks (threads of gloo included), as medians, and how many
times those of the first. Where there are fewer cores than ranks, CPU time is what shows the work that owners save. Fails if
bits differ from one device's, if bytes differ from the bound, or if less than 2.5 times is saved on four ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.model_shapes import shape_list
from vescale.comm import record_comms
from vescale.optim import Muon
from vescale.optim._matrix_blocks import matrix_grid
from vescale.optim._matrix_parameters import MeshRanks, PlacedMatrix, assign_owners
from vescale.optim._muon import newton_schulz_cost
from vescale.optim._state_loading import holdings
from vescale.placements import RaggedShard, distribute_tensor, normalize_placements

BOUND, SPEED = 1.15, 2.5
LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


def matrices_of(name: str) -> list[tuple[int, ...]]:
    """Shapes of the parameters that Muon takes: all of 2 and 3 dims in the layers, but packed biases."""
    if name == "llama-3-8b":
        return LLAMA_8B * 32
    layers = [unit for unit in shape_list(name).units if unit.path != "(root)"]
    shapes = [(key, tuple(shape)) for unit in layers for _ in range(unit.count) for key, shape in unit.parameters]
    return [shape for key, shape in shapes if len(shape) in (2, 3) and "bias" not in key]


def plan() -> int:
    failed = False
    print(
        f"{'model':26} {'ranks':>5} {'matrices':>8} {'largest / mean cost':>20} {'busiest rank / mean':>20} {'CPU s':>8}"
    )
    for name in ("llama-3-8b", "qwen3-30b-a3b", "qwen3-30b-a3b-per-expert", "gpt-oss-120b"):
        for num_ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
            kinds = {}
            for shape in dict.fromkeys(matrices_of(name)):
                ragged = RaggedShard(tuple(range(len(shape))))
                kinds[shape] = normalize_placements([ragged], shape, (num_ranks,))
            mesh = MeshRanks((num_ranks,), tuple(range(num_ranks)))
            begin = time.process_time()
            placed = []
            for shape in matrices_of(name):
                grid = matrix_grid(shape, None, name)
                for box, held in zip(grid.boxes, holdings(grid, kinds[shape], (num_ranks,))):
                    cost = newton_schulz_cost(*grid.matrix_shape(box.sizes))
                    placed.append(PlacedMatrix(cost, mesh, held.fixed, held.is_kept))
            ownership = assign_owners(placed)
            seconds = time.process_time() - begin
            largest = max(matrix.cost for matrix in placed) / ownership.mean_cost
            failed |= ownership.imbalance > BOUND * max(1.0, largest) or seconds > 1
            print(
                f"{name:26} {num_ranks:>5} {len(placed):>8} {largest:>20.3f} {ownership.imbalance:>20.3f} {seconds:>8.2f}"
            )
    return int(failed)


def step(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cpu", (args.ranks,))
    torch.manual_seed(0)
    values = [torch.randn(args.side, args.side * (1 + index % 2)) for index in range(args.matrices)]
    gradients = [torch.randn_like(value) for value in values]

    def cut(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    ours, dtensors, whole = ([nn.Parameter(each(v)) for v in values] for each in (cut, cut, torch.clone))
    optimizer = Muon(ours, lr=0.02, norm_dtype=None)
    stock, redundant = torch.optim.Muon(dtensors, lr=0.02), torch.optim.Muon(whole, lr=0.02)
    for members in (ours, dtensors):
        for parameter, gradient in zip(members, gradients):
            parameter.grad = cut(gradient)

    def on_every_rank() -> None:
        for parameter, twin in zip(ours, whole):
            twin.grad = parameter.grad.full_tensor()
        redundant.step()

    runs: dict[str, Callable[[], Any]] = {
        "owners": optimizer.step,
        "every rank all": on_every_rank,
        "torch on DTensors": stock.step,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    with record_comms() as ledger:
        optimizer.step()
    on_every_rank()
    stock.step()
    for number in range(args.rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            spent = torch.tensor([time.process_time() - cpu])
            dist.barrier()
            wall = time.perf_counter() - wall
            dist.all_reduce(spent)
            times[name].append((wall, spent.item()))
    same = all(map(torch.equal, [each.full_tensor() for each in ours], whole))
    moved = torch.tensor([float(ledger.bytes("all_to_all_v"))])
    dist.all_reduce(moved)
    if rank == 0:
        elements = sum(value.numel() for value in values)
        bound = elements * (2 + 2) * (args.ranks - 1) / args.ranks  # bfloat16 both ways, but what the owner holds
        print(f"{args.matrices} matrices of {args.side} rows on {args.ranks} ranks, {os.cpu_count()} cores")
        found = {name: tuple(map(statistics.median, zip(*each))) for name, each in times.items()}
        own, ratios = found["owners"], []
        for name, (wall, cpu) in found.items():
            ratios.append((wall / own[0], cpu / own[1]))
            print(
                f"{name:18} wall {wall:.3f} s ({ratios[-1][0]:.2f}), CPU of all ranks {cpu:.3f} s ({ratios[-1][1]:.2f})"
            )
        print(f"bytes of all ranks in a step: {moved.item():,.0f}, bound {bound:,.0f}; bits of one device: {same}")
        is_fast = args.ranks != 4 or all(max(pair) >= SPEED for pair in ratios[1:])
        if not (same and is_fast and moved.item() == bound):
            raise SystemExit(1)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plan", "step"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--side", type=int, default=192)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.what == "plan":
        return plan()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(step, (folder, args), args.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
