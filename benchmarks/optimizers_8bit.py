"""8-bit AdamW against torch's fused AdamW: time of a step and bytes of states, on the CPU.

Run ``python -m benchmarks.optimizers_8bit``. Steps of both run by turns in one process; the ratio is the median of the
ratios of pairs. With ``--threads 1`` times are CPU time of the thread, else wall time. ``--width`` bounds the vectors of the
C++ helper: 8 is what it does on a processor with AVX2, 1 on others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from vescale import csrc
from vescale.optim import AdamW8bit, _adamw8bit_update


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=10)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args()
    _adamw8bit_update._WIDTH = args.width
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter

    def made(kind: Any, **options: Any) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(args.parameters // args.tensors)) for _ in range(args.tensors)]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        return kind(params, lr=1e-4, **options)

    ours, theirs = made(AdamW8bit), made(torch.optim.AdamW, fused=True)
    times: dict[str, list[float]] = {"ours": [], "fused": []}
    for _ in range(args.steps):
        for name, optimizer in (("ours", ours), ("fused", theirs)):
            begin = clock()
            optimizer.step()
            times[name].append(clock() - begin)
    ratio = statistics.median(a / b for a, b in zip(times["ours"][1:], times["fused"][1:]))
    native = "C++" if csrc.load("adamw8bit") is not None else "fallback"
    print(f"parameters {args.parameters:,} in {args.tensors} tensors, {args.threads} thread(s), {native}")
    for name in times:
        print(f"{name:6} {statistics.median(times[name][1:]) * 1e3:8.2f} ms a step")
    print(f"ratio  {ratio:8.2f} (asked: at most 1.3)")
    for name, optimizer in (("ours", ours), ("fused", theirs)):
        print(f"{name:6} {state_bytes(optimizer) / args.parameters:8.3f} bytes of states a parameter")


if __name__ == "__main__":
    main()
