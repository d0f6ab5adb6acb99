"""What an op on DTensors costs beyond the same op on local tensors: PyTorch's path and the C++ dispatcher, side by side.

python benchmarks/dispatch.py [--turns 15] [--calls 300] [--section ops|conversions|misses]

The process group is fake (collectives return at once), one thread, processor time. In each turn, the plain op, PyTorch's
path and the C++ dispatcher run one after the other; the medians over the turns are printed. Overheads are differences to the
plain op, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale.compat.sharding_caches as caches
from vescale.compat import all_gather_single, clear_sharding_caches, extend_dtensor, is_native, local_of
from vescale.compat.native_dispatch import without_native
from vescale.ops import convert, enter_local, leave_local, wrap_global
from vescale.ops._conversion import enter_together

Call = Callable[[], Any]
GOAL_MEDIAN, GOAL_ANY = 1.5, 4.0


def cost(call: Call, num_calls: int) -> float:
    """Microseconds of one call."""
    start = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - start) / num_calls * 1e6


def medians(calls: Sequence[tuple[Call, Any]], turns: int, num_calls: int) -> list[float]:
    """The median cost of each call, made inside of its context."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for times, (call, context) in zip(found, calls):
            with context():
                measured = cost(call, num_calls)
            if turn:  # the first one decides
                times.append(measured)
    return [statistics.median(times) for times in found]


def cases(mesh: DeviceMesh) -> dict[str, tuple[Call, Call]]:
    """By name: the op on local tensors and on DTensors."""
    torch.manual_seed(0)

    def sharded(*shape: int, dim: int | None = 0) -> DTensor:
        return distribute_tensor(
            torch.rand(shape), mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=None
        )

    x, y, r = sharded(16, 64), sharded(16, 64), sharded(16, 64, dim=None)
    three, weight, bias = sharded(4, 8, 64), sharded(64, 64, dim=None), sharded(64, dim=None)
    column, long, index = sharded(64, 64, dim=1), sharded(16, 64, dim=1), sharded(16, 8).mul(9).long()
    row = sharded(64, 64)
    ops: dict[str, tuple[Callable[..., Any], tuple[DTensor, ...]]] = {
        "view": (lambda a: a.view(a.shape[0], 8, 8), (x,)),
        "view of replicas": (lambda a: a.view(-1, 8, 8), (r,)),
        "transpose": (lambda a: a.transpose(0, 1), (x,)),
        "unsqueeze": (lambda a: a.unsqueeze(1), (x,)),
        "select": (lambda a: a[:, 3], (x,)),
        "slice": (lambda a: a[:, 2:5], (x,)),
        "expand": (lambda a: a.unsqueeze(1).expand(-1, 2, -1), (x,)),
        "detach": (lambda a: a.detach(), (x,)),
        "add": (torch.add, (x, y)),
        "add of replicas": (torch.add, (r, r)),
        "add_": (lambda a, b: a.add_(b), (x, y)),
        "mul": (torch.mul, (x, y)),
        "mul by a number": (lambda a: a * 2.0, (x,)),
        "div by a number": (lambda a: a / 3.0, (x,)),
        "neg": (torch.neg, (x,)),
        "exp": (torch.exp, (x,)),
        "pow": (lambda a: a.pow(2), (x,)),
        "rsqrt": (torch.rsqrt, (x,)),
        "silu": (F.silu, (x,)),
        "gelu": (F.gelu, (x,)),
        "where": (lambda a, b: torch.where(a > 0.5, a, b), (x, y)),
        "clone": (torch.clone, (x,)),
        "zeros_like": (torch.zeros_like, (x,)),
        "to bfloat16": (lambda a: a.to(torch.bfloat16), (x,)),
        "sum": (lambda a: a.sum(-1), (x,)),
        "mean": (lambda a: a.mean(-1, keepdim=True), (x,)),
        "amax": (lambda a: a.amax(-1), (x,)),
        "softmax": (lambda a: a.softmax(-1), (x,)),
        "cat": (lambda a, b: torch.cat([a, b], 1), (x, y)),
        "split": (lambda a: a.split(32, 1), (x,)),
        "mm": (torch.mm, (x, weight)),
        "mm by columns": (torch.mm, (r, column)),
        "mm to a sum": (torch.mm, (long, row)),
        "addmm": (torch.addmm, (bias, x, weight)),
        "embedding": (F.embedding, (index, weight)),
        "foreach_add of 10": (lambda *xs: torch._foreach_add(list(xs), 1.0), (x,) * 10),
        "linear, 3 dims": (F.linear, (three, weight)),
        "layer_norm": (lambda a, w, b: F.layer_norm(a, (64,), w, b), (three, bias, bias)),
        "rms_norm": (lambda a, w: F.rms_norm(a, (64,), w), (three, bias)),
    }

    def bound(function: Callable[..., Any], operands: Sequence[Any]) -> Call:
        return lambda: function(*operands)

    return {name: (bound(f, [local_of(x) for x in xs]), bound(f, xs)) for name, (f, xs) in ops.items()}


def measure_ops(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    print(f"{'us beyond the local op':24} {'local op':>9} {'PyTorch':>9} {'C++':>9}")
    ours = []
    with torch.no_grad():
        for name, (plain, op) in cases(mesh).items():
            calls = [(plain, nullcontext), (op, without_native), (op, nullcontext)]
            local, stock, native = medians(calls, args.turns, args.calls)
            print(f"{name:24} {local:9.2f} {stock - local:9.2f} {native - local:9.2f}")
            ours.append(native - local)
    print(
        f"C++: median {statistics.median(ours):.2f} us (goal {GOAL_MEDIAN}), largest {max(ours):.2f} us (goal {GOAL_ANY}), "
        f"{len(ours)} ops\n"
    )


def measure_misses(args: argparse.Namespace) -> None:
    """The first call of an op with specs that were not met before: a new size for each."""
    print(f"{'us of a first call':24} {'add':>9} {'mm':>9} {'view':>9} {'softmax':>9}")
    for num_axes in (1, 2, 3, 6):
        mesh = init_device_mesh("cpu", (2, 2, 1, 1, 1, 1)[:num_axes])
        placements = [Shard(0), *(Replicate(),) * (num_axes - 1)]
        weight = distribute_tensor(torch.rand(8, 8), mesh, [Replicate()] * num_axes, src_data_rank=None)
        found: dict[str, list[float]] = {name: [] for name in ("add", "mm", "view", "softmax")}
        for turn in range(args.turns + 1):
            x = DTensor.from_local(torch.rand(8 + turn, 8), mesh, placements, run_check=False)
            for name, call in (
                ("add", lambda: x + x),  # noqa: B023
                ("mm", lambda: x @ weight),  # noqa: B023
                ("view", lambda: x.view(-1, 2, 4)),  # noqa: B023
                ("softmax", lambda: x.softmax(-1)),  # noqa: B023
            ):
                measured = cost(call, 1)
                if turn:
                    found[name].append(measured)
        print(f"{num_axes} axes{'':18}" + "".join(f" {statistics.median(times):9.0f}" for times in found.values()))
    print(f"specs kept: {len(caches.INTERNED_SPECS)}\n")
    clear_sharding_caches()


def by_hand() -> dict[str, Call]:
    """Changes of placements over four ranks in plain code: the collective, and the copies around it."""
    local = torch.rand(16, 64)

    def gather() -> torch.Tensor:
        out = torch.empty(64, 64)
        all_gather_single(out, local)
        return out

    def exchange(send: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(send)
        dist.all_to_all_single(out, send)
        return out

    return {
        "R -> R": local.detach,
        "P -> R": lambda: dist.all_reduce(local.clone()),
        "S(0) -> R": gather,
        "S(1) -> R": lambda: torch.cat(gather().chunk(4), 1),
        "R -> S(0)": lambda: local[:4].clone(),
        "R -> S(1)": lambda: local[:, :16].contiguous(),
        "P -> S(0)": lambda: exchange(local).view(4, 4, 64).sum(0),
        "P -> S(1)": lambda: exchange(torch.cat(local.chunk(4, 1))).view(4, 16, 16).sum(0),
        "S(0) -> S(1)": lambda: exchange(torch.cat(local.chunk(4, 1))).view(64, 16),
        "S(1) -> S(0)": lambda: torch.cat(exchange(local).chunk(4), 1),
    }


def measure_conversions(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    print(
        f"{'us; collectives return at once':32} {'by hand':>9} {'Python':>9} {'C++':>9}   and with the gradient's way"
    )
    named = {"R": Replicate(), "P": Partial(), "S(0)": Shard(0), "S(1)": Shard(1)}
    local, hand = torch.rand(16, 64), by_hand()

    def row(name: str, plain: Call, call: Callable[[], torch.Tensor], leaf: torch.Tensor) -> None:
        gradient = call().detach()
        back = lambda: torch.autograd.grad(call(), leaf, gradient)  # noqa: E731
        figures = [(plain, nullcontext), *((c, mode) for c in (call, back) for mode in (without_native, nullcontext))]
        found = medians(figures, args.turns, args.calls)
        print(f"{name:32} {found[0]:9.1f} {found[1]:9.1f} {found[2]:9.1f} {found[3]:11.1f} {found[4]:9.1f}")

    for name, plain in hand.items():
        source, target = (named[side] for side in name.split(" -> "))
        x = DTensor.from_local(local, mesh, [source], run_check=False).requires_grad_()
        row(name, plain, lambda: convert(x, (target,)), x)  # noqa: B023
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).requires_grad_()
    leaf, cut, whole = local.clone().requires_grad_(), (Shard(0),), (Replicate(),)
    row("enter_local", local.detach, lambda: enter_local(x), x)
    row("enter_together of 3", local.detach, lambda: enter_together((x, x, x), (cut,) * 3)[0], x)
    row("leave_local", local.detach, lambda: leave_local(leaf, mesh, cut, (64, 64), "op"), leaf)
    row("wrap_global, R", local.detach, lambda: wrap_global(leaf, mesh, whole), leaf)
    row("wrap_global, S(0)", hand["R -> S(0)"], lambda: wrap_global(leaf, mesh, cut), leaf)
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300, help="in a turn")
    parser.add_argument("--section", choices=["ops", "misses", "conversions"], help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    extend_dtensor()
    if not is_native():
        print("the C++ dispatcher is not installed: both columns are PyTorch's path")
    if args.section in (None, "ops"):
        measure_ops(mesh, args)
    if args.section in (None, "conversions"):
        measure_conversions(mesh, args)
    if args.section in (None, "misses"):
        measure_misses(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
