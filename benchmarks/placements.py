"""What our placements cost per op: ratios against ``Shard(0)``, and what ``install()`` costs stock ops.

    python benchmarks/placements.py [--json] [--repeats N]

Runs on a fake process group of 4 ranks, so that no time goes to communication, on one thread.

==================================  ======  ==========================================================================
figure                              bound   how
==================================  ======  ==========================================================================
``add``: Ragged / Shard(0)          1.05    one process, short bursts that take turns; median of the turns' ratios
AdamW foreach step, 50 parameters   1.05    the same
stock ops after / before install    1.01    install() cannot be undone, so fresh processes in turn, one with it between two
                                            without; each gives the median of its bursts, and a ratio is taken within
                                            such a turn. The median over the turns; "noise" is the same ratio of the two
                                            processes without it.
==================================  ======  ==========================================================================

An op that is dispatched pays nothing after install(): the hook is on the miss path of the dispatcher's cache. The Python
entry points that are wrapped (``from_local``, ``redistribute``) pay one look at the placements; a second table gives them
against the unwrapped functions in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BOUNDS = {"ragged add": 1.05, "ragged AdamW": 1.05, "stock": 1.01}
WORLD = 4


def start() -> Any:
    """A mesh of 4 fake ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    return init_device_mesh("cpu", (WORLD,))


class Timing:
    """Seconds of one call of each op, over many turns in which the ops ran one after the other."""

    def __init__(self, ops: dict[str, Callable[[], Any]], turns: int, burst: int) -> None:
        """``burst`` calls of each op in each of ``turns``; the order alternates, so that noise meets all alike."""
        self.turns: dict[str, list[float]] = {name: [] for name in ops}
        for op in ops.values():
            for _ in range(burst):
                op()
        names = list(ops)
        for turn in range(turns):
            for name in names if turn % 2 else names[::-1]:
                op = ops[name]
                begin = time.perf_counter()
                for _ in range(burst):
                    op()
                self.turns[name].append((time.perf_counter() - begin) / burst)

    def seconds(self) -> dict[str, float]:
        return {name: statistics.median(found) for name, found in self.turns.items()}

    def ratio(self, name: str, reference: str) -> float:
        """The median over the turns of one op's time relative to another's in the same turn."""
        return statistics.median(a / b for a, b in zip(self.turns[name], self.turns[reference]))


def ragged_against_shard(repeats: int) -> dict[str, Timing]:
    """The same ops on ``Shard(0)`` and on a ragged placement of the same sizes; entry points wrapped and unwrapped."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    from vescale.compat import stock
    from vescale.placements import RaggedShard, distribute_tensor

    mesh = start()
    placements = {"shard": [Shard(0)], "ragged": [RaggedShard((0,), (16,) * WORLD)]}
    data = torch.randn(64, 16)
    adds, steps = {}, {}
    parameters: dict[str, list[torch.nn.Parameter]] = {name: [] for name in placements}
    for _ in range(50):  # in turn, so that they lie alike in memory
        for name, placement in placements.items():
            parameter = torch.nn.Parameter(distribute_tensor(data.clone(), mesh, placement, src_data_rank=None))
            parameter.grad = distribute_tensor(data.clone(), mesh, placement, src_data_rank=None)
            parameters[name].append(parameter)
    for name, placement in placements.items():
        x = distribute_tensor(data, mesh, placement, src_data_rank=None)
        adds[name] = lambda x=x: x + x
        steps[name] = torch.optim.AdamW(parameters[name], foreach=True).step
    x = distribute_tensor(data, mesh, [Shard(0)], src_data_rank=None)
    local, wanted, original = x.to_local(), [Shard(1)], stock()
    return {
        "add": Timing(adds, repeats * 10, 50),
        "AdamW": Timing(steps, repeats * 5, 2),
        "from_local": Timing(
            {
                "stock": lambda: original.from_local(local, mesh, [Shard(0)]),
                "wrapped": lambda: DTensor.from_local(local, mesh, [Shard(0)]),
            },
            repeats * 10,
            20,
        ),
        "redistribute": Timing(
            {
                "stock": lambda: original.redistribute(x, mesh, wanted),
                "wrapped": lambda: x.redistribute(mesh, wanted),
            },
            repeats * 10,
            20,
        ),
    }


def stock_ops(install: bool, repeats: int) -> dict[str, float]:
    """Seconds of stock ops on ``Shard(0)``, with or without our extensions in place."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import vescale.ops  # both sides import the same code

    mesh = start()
    if install:
        vescale.ops.install()
    x = distribute_tensor(torch.randn(64, 16), mesh, [Shard(0)], src_data_rank=None)
    w = distribute_tensor(torch.randn(16, 16), mesh, [Replicate()], src_data_rank=None)
    parameters = [torch.nn.Parameter(x.clone()) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = x.clone()
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    ops: dict[str, Callable[[], Any]] = {
        "add": lambda: x + x,
        "mul scalar": lambda: x * 2.0,
        "matmul": lambda: x @ w,
        "view": lambda: x.view(64, 4, 4),
        "sum": lambda: x.sum(),
        "redistribute": lambda: x.redistribute(mesh, [Shard(1)]),
        "to_local": lambda: x.to_local(),
        "AdamW": optimizer.step,
    }
    return Timing(ops, repeats * 4, 20).seconds()


def child(install: bool, repeats: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", "after" if install else "before", "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def pairs(repeats: int, num_pairs: int) -> dict[str, dict[str, float]]:
    """For each stock op the median ratio after/before install over pairs of processes, and before/before as the noise."""
    ratios: dict[str, list[float]] = {}
    noise: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for index in range(num_pairs):
        kinds = [False, True, False] if index % 2 else [True, False, False]
        first, second, third = (child(kind, repeats) for kind in kinds)
        before, after, again = (first, second, third) if index % 2 else (second, first, third)
        for op in before:
            ratios.setdefault(op, []).append(after[op] / statistics.mean((before[op], again[op])))
            noise.setdefault(op, []).append(again[op] / before[op])
            seconds.setdefault(op, []).append(before[op])
    return {
        op: {
            "seconds": statistics.median(seconds[op]),
            "ratio": statistics.median(ratios[op]),
            "noise": statistics.median(noise[op]),
        }
        for op in ratios
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=30, help="bursts of each op (times a factor of the op)")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of processes with and without install()")
    parser.add_argument("--child", choices=["before", "after"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(stock_ops(options.child == "after", options.repeats)))
        return
    ragged = ragged_against_shard(options.repeats)
    stock = pairs(options.repeats, options.pairs)
    overall = statistics.geometric_mean([found["ratio"] for found in stock.values()])
    figures = {
        "ragged add": ragged["add"].ratio("ragged", "shard"),
        "ragged AdamW": ragged["AdamW"].ratio("ragged", "shard"),
        "stock": overall,
    }
    wrappers = {name: ragged[name].ratio("wrapped", "stock") for name in ("from_local", "redistribute")}
    seconds = {name: timing.seconds() for name, timing in ragged.items()}
    if options.json:
        found = {"figures": figures, "bounds": BOUNDS, "wrappers": wrappers, "seconds": seconds, "stock": stock}
        print(json.dumps(found, indent=2))
        return
    print(f"{'figure':<44}{'ratio':>8}{'bound':>8}")
    for name, ratio in figures.items():
        print(f"{name:<44}{ratio:8.3f}{BOUNDS[name]:8.2f}")
    print(f"\n{'stock op after / before install':<32}{'us':>8}{'ratio':>8}{'noise':>8}")
    for op, found in stock.items():
        print(f"{op:<32}{found['seconds'] * 1e6:8.1f}{found['ratio']:8.3f}{found['noise']:8.3f}")
    print(f"\n{'wrapped / unwrapped, same process':<44}{'ratio':>8}")
    for name, ratio in wrappers.items():
        print(f"{name:<44}{ratio:8.3f}")
    print()
    for name, times in seconds.items():
        print(f"{name}: " + ", ".join(f"{kind} {value * 1e6:.2f} us" for kind, value in times.items()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    main()
