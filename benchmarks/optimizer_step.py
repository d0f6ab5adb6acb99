"""What an optimizer's step on DTensor parameters costs, as a multiple of the step on plain tensors of the local sizes.

For each optimizer and implementation, a step on plain tensors and one on DTensors take turns. First with PyTorch alone,
then after vescale has been installed, in one process. The process group is fake (collectives return at once), one thread
runs, and CPU time is measured: the medians over the rounds are divided. Clipping (``vescale.optim.clip_grad_norm_``, and
PyTorch's) is measured in the same way, against PyTorch's on plain tensors.

python benchmarks/optimizer_step.py [--rounds 60] [--sizes 4x1024,100x256,100x64,1000x16] [--only AdamW]

``100x64`` is 100 parameters of 64 by 64 elements on each rank. Fails if a step with few large parameters (the first size)
takes more than 1.02 times the plain one, or clipping more than 1.3 times.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

STEP_LIMIT, CLIP_LIMIT = 1.02, 1.3
FORMS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "AdamW": (torch.optim.AdamW, {}, ("loop", "foreach", "fused")),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, ("loop", "foreach", "fused")),
    "Adagrad": (torch.optim.Adagrad, {}, ("loop", "foreach", "fused")),
    "RMSprop": (torch.optim.RMSprop, {}, ("loop", "foreach")),
    "NAdam": (torch.optim.NAdam, {}, ("loop", "foreach")),
}


def parameters(number: int, side: int, mesh: DeviceMesh | None) -> list[torch.nn.Parameter]:
    """Every fifth one replicated, as norms and biases are; with gradients."""

    def tensor(index: int) -> torch.Tensor:
        local = torch.randn(side, side)
        if mesh is None:
            return local
        return DTensor.from_local(local, mesh, [Replicate() if index % 5 == 0 else Shard(0)])

    found = [torch.nn.Parameter(tensor(index)) for index in range(number)]
    for index, parameter in enumerate(found):
        parameter.grad = tensor(index)
    return found


def ratio(runs: list[Callable[[], object]], rounds: int) -> tuple[float, float]:
    """(median microseconds of the first, median of the second by that of the first)"""
    for run in runs:
        for _ in range(3):
            run()
    times: list[list[float]] = [[], []]
    gc.collect()
    gc.disable()
    for number in range(rounds):
        for i in (0, 1) if number % 2 else (1, 0):
            start = time.thread_time_ns()
            runs[i]()
            times[i].append((time.thread_time_ns() - start) / 1e3)
    gc.enable()
    plain, distributed = map(statistics.median, times)
    return plain, distributed / plain


def measure(
    sizes: list[tuple[int, int]], mesh: DeviceMesh, rounds: int, only: set[str], clips: list[Any]
) -> dict[tuple[str, tuple[int, int]], tuple[float, float]]:
    found = {}
    for size in sizes:
        repeats = max(10, min(rounds, rounds * 100 * 64 * 64 // (size[0] * size[1] ** 2)))
        for name, (kind, options, forms) in OPTIMIZERS.items():
            for form in forms if not only or name in only else ():
                sides = [kind(parameters(*size, on), **options, **FORMS[form]) for on in (None, mesh)]
                with contextlib.suppress(NotImplementedError):  # PyTorch has no strategy for some fused steps
                    found[f"{name} {form}", size] = ratio([optimizer.step for optimizer in sides], repeats)
        plain, distributed = parameters(*size, None), parameters(*size, mesh)
        for clip in clips if not only or "clip" in only else ():
            runs = [partial(torch.nn.utils.clip_grad_norm_, plain, 1.0, foreach=True), partial(clip, distributed, 1.0)]
            found[f"{clip.__module__.partition('.')[0]} clip_grad_norm_", size] = ratio(runs, repeats)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", default="4x1024,100x256,100x64,1000x16")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=set())
    args = parser.parse_args()
    sizes = [(int(n), int(side)) for n, _, side in (size.partition("x") for size in args.sizes.split(","))]
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    stock = measure(sizes, mesh, args.rounds, args.only, [torch.nn.utils.clip_grad_norm_])

    from vescale.compat import install
    from vescale.optim import clip_grad_norm_

    install()
    ours = measure(sizes, mesh, args.rounds, args.only, [torch.nn.utils.clip_grad_norm_, clip_grad_norm_])
    missed = []
    print(f"{'':26}" + "".join(f"{f'{n} x {side}x{side}':>28}" for n, side in sizes))
    print(f"{'':26}" + f"{'plain us':>12}{'stock':>8}{'ours':>8}" * len(sizes))
    for name in dict.fromkeys(name for name, _ in ours):
        row = f"{name:26}"
        for size in sizes:
            plain, factor = ours[name, size]
            before = f"{stock[name, size][1]:8.2f}" if (name, size) in stock else f"{'-':>8}"
            row += f"{plain:12.0f}{before}{factor:8.3f}"
            if size == sizes[0] and factor > (CLIP_LIMIT if "clip" in name else STEP_LIMIT):
                missed.append(f"{name} {factor:.3f}")
        print(row)
    print("\nabove the limit: " + (", ".join(missed) or "none"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
