"""What each part of the fast path is worth: a training step of a tensor-parallel Llama, with the parts added one by one.

Each row is a process of its own, in which the step and the same work written by hand (local tensors, the same collectives)
take turns; the process group is fake, so that only the host's work shows. Rows add up:

* ``stock``: ``parallelize_module`` with PyTorch alone, DTensors inside the linear layers only;
* ``python``: `parallelize` with everything in Python (``VESCALE_DISPATCH=stock``);
* ``ops``: ops on DTensors run in C++, by interned specs;
* ``composites``: `linear` and the norms are one op with one autograd node;
* ``conversions``: placements change, and local regions begin and end, in C++;
* ``hooks``: the function mode passes calls on, and modules run their hooks, in C++: all of `parallelize`;
* ``static``: the same with ``mode="static"``.

python -m benchmarks.ablation [--layers 4] [--hidden 64] [--rounds 40] [--only ROW]

Times are processor time. The last columns: the first step; the mean of the first steps with six other lengths; a step of
AdamW (foreach), by that of the model written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.parallelize import NUM_RANKS, by_hand, llama, ours, stock

ROWS = ("stock", "python", "ops", "composites", "conversions", "hooks", "static")


def leave_out(row: str) -> None:
    """Replace what later rows add by its form in Python."""
    missing = ROWS[ROWS.index(row) + 1 :]
    if row in ("stock", "python"):
        return

    def module(name: str) -> Any:
        return importlib.import_module(f"vescale.{name}")

    if "conversions" in missing:
        dispatch = module("compat.native_dispatch")
        idle = dispatch.NativeConversions(*(dispatch._nothing,) * len(dispatch.NativeConversions._fields))
        module("ops._conversion").NATIVE = idle
    if "hooks" in missing:
        module("runtime._module_calls").filter_functions = lambda *_: None
        module("runtime._install").native_hooks = lambda: None


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def step_of(model: nn.Module, tokens: int) -> Callable[[], None]:
    ids = torch.randint(0, 256, (2, tokens))

    def run() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return run


def take_turns(runs: Iterable[Callable[[], object]], rounds: int) -> list[float]:
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for times, run in zip(found, runs):
            times.append(seconds(run))
    return [statistics.median(times) for times in found]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """DTensors and other parameters apart: PyTorch's kernels for lists do not mix them."""
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == wanted] for wanted in (False, True)]
    return [{"params": kind} for kind in kinds if kind]


def measure(args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    hand = by_hand(llama(args, NUM_RANKS))
    if args.row == "stock":
        model = llama(args)
        stock(model, mesh)
    else:
        leave_out(args.row)
        model = ours(llama(args), mesh, "static" if args.row == "static" else "eager")
        if args.row == "ops":
            importlib.import_module("vescale.csrc").load_module("dispatch").remove_composites()
    by_ours, plain = step_of(model, 16), step_of(hand, 16)
    found = {"first": seconds(by_ours)}
    for _ in range(3):
        by_ours(), plain()
    found["hand"], found["ours"] = take_turns((plain, by_ours), args.rounds)
    found["length"] = statistics.mean(seconds(step_of(model, tokens)) for tokens in (18, 22, 26, 30, 34, 38))
    optimizers = [torch.optim.AdamW(_groups(m), foreach=True) for m in (hand, model)]
    plain(), by_ours()
    for optimizer in optimizers:
        optimizer.step()
    own, other = take_turns([o.step for o in optimizers], args.rounds)
    found["optimizer"] = other / own
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args)))
        return 0
    print(f"{args.layers} layers, hidden {args.hidden}, tp={NUM_RANKS}")
    print(f"{'':12} {'by hand':>9} {'step':>9} {'ratio':>6} {'first':>9} {'length':>9} {'AdamW':>6}")
    for row in [args.only] if args.only else ROWS:
        environment = {**os.environ, **({"VESCALE_DISPATCH": "stock"} if row == "python" else {})}
        sizes = [f"--{name}={getattr(args, name)}" for name in ("layers", "hidden", "rounds")]
        command = [sys.executable, "-m", "benchmarks.ablation", "--row", row, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        found = json.loads(done.stdout.splitlines()[-1])
        hand, own, first, length = (found[name] * 1e3 for name in ("hand", "ours", "first", "length"))
        times = f"{hand:6.2f} ms {own:6.2f} ms {own / hand:6.2f} {first:6.0f} ms {length:6.0f} ms"
        print(f"{row:12} {times} {found['optimizer']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
