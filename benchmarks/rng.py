"""What single-device random numbers cost on a CPU: ratios of pairs measured in turn, in one run.

    python benchmarks/rng.py [--json] [--turns N] [--small] [--llama]

============================  ========  =====================================================================================
figure                        bound     how
============================  ========  =====================================================================================
Shard(0) of 4096 x 4096       1.15      filling the last quarter of the rows, over the native op on a tensor of its size
                                        plus the two jumps (to its first word, and to the final state)
Shard(1) of 4096 x 4096       1.10      filling the last quarter of the columns, over the native op on the whole tensor
far jump, C++ helper          2 ms      2^40 words, the polynomial not in the cache
far jump, numpy               100 ms    the same
small fills of DTensors       1.50      1,024, 32,768 and 1M elements, Replicate and a quarter by Shard(0) and Shard(1), over
                                        the native op on the whole tensor: fills, ``rand_like``, dropout; --small
Llama-3-8B, 1 of 64 ranks     1.10      growth of peak memory during ``materialize`` of a model built under ``deferred_init``
                                        (and during ``parallelize``), over the bytes of the local shards; --llama
============================  ========  =====================================================================================

Processor time of one thread; the ratio of the fastest calls over turns in which the two sides ran one after the other (other
work on the machine only adds), with the median of the turns' ratios beside it. Exit code: 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale import csrc, rng
from vescale.placements import local_region
from vescale.rng import _mt19937 as _mt19937_jump
from vescale.rng._cpu_engine import fill_region
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._random_ops import Fill, RandomOp

SIZE, RANKS = 4096, 4
OPS = {
    "uniform_": RandomOp("uniform_", (0.0, 1.0)),
    "normal_": RandomOp("normal_", (0.0, 1.0)),
    "bernoulli_": RandomOp("bernoulli_", (0.1,)),
}
FAR = 2**40


def seconds(call: Callable[[], Any]) -> float:
    """Of this thread's processor time: waiting for a processor that others use does not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def paired(ours: Callable[[], Any], reference: Callable[[], Any], turns: int) -> tuple[float, float]:
    """ours / reference: of the fastest calls, and the median of the turns."""
    ours()
    reference()
    times: dict[Any, list[float]] = {ours: [], reference: []}
    for turn in range(turns):
        for side in (ours, reference) if turn % 2 else (reference, ours):
            times[side].append(seconds(side))
    median = statistics.median(a / b for a, b in zip(times[ours], times[reference], strict=True))
    return min(times[ours]) / min(times[reference]), median


def shard_ratio(op: RandomOp, dim: int, turns: int) -> tuple[float, float]:
    """Shard(0): over the native op on the quarter and the jumps; Shard(1): over the native op on everything."""
    region = local_region((SIZE, SIZE), [Shard(dim)], (RANKS,), (RANKS - 1,))
    local = torch.empty(region.local_shape)
    generator = torch.Generator()
    state = Mt19937State.of(generator)
    words = 2 if op.name == "bernoulli_" else 1
    native = torch.empty(region.local_shape) if dim == 0 else torch.empty(SIZE, SIZE)

    def ours() -> None:
        fill_region(local, Fill(op, region, (SIZE, 1)), generator.manual_seed(1))

    def reference() -> None:
        op.fill(native, generator.manual_seed(1))
        if dim == 0:
            state.skip(words * (SIZE * SIZE - local.numel()))
            state.skip(words * SIZE * SIZE)

    return paired(ours, reference, turns)


def far_jump(turns: int) -> tuple[float, float]:
    """(fastest, median) milliseconds of a jump whose polynomial has to be computed."""
    state = Mt19937State.of(torch.Generator().manual_seed(1))
    times = []
    for turn in range(turns):
        _mt19937_jump._native_power_of_t.cache_clear()
        _mt19937_jump.power_of_t.cache_clear()
        times.append(seconds(lambda distance=FAR + turn: state.skip(distance)))  # type: ignore[misc]
    return 1e3 * min(times), 1e3 * statistics.median(times)


CALLS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.9),
    "rand_like": torch.rand_like,
    "F.dropout": lambda x: F.dropout(x, 0.1),
    "native_dropout": lambda x: torch.native_dropout(x, 0.1, True),
}


def small_fills(turns: int) -> Iterator[tuple[str, float, float, float]]:
    """(name, bound, ratio of the fastest, median ratio) of ops on DTensors, on the second of four ranks."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    rng.enable()
    for numel in (1 << 10, 1 << 15, 1 << 20):
        rows = 1 << (numel.bit_length() // 2)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            whole = torch.ones(rows, numel // rows, dtype=dtype)
            for placement in (Replicate(), Shard(0), Shard(1)):
                part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                for name, call in CALLS.items():
                    repeats = max(1, (1 << 15) // numel)  # calls in a turn: clocks are coarse
                    ratios = paired(
                        lambda call=call, x=part, n=repeats: [call(x) for _ in range(n)],  # type: ignore[misc]
                        lambda call=call, x=whole, n=repeats: [call(x) for _ in range(n)],  # type: ignore[misc]
                        turns,
                    )
                    yield f"{name} {numel} {str(dtype)[6:]} {placement}", 1.5, *ratios
    rng.disable()
    dist.destroy_process_group()


_LLAMA = """
import resource, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM
from vescale import INIT, RUN, Plan, RaggedShard, parallelize
from vescale.rng import deferred_init, materialize

how = sys.argv[1]
dist.init_process_group("fake", rank=37, world_size=64, store=FakeStore())
mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("fsdp",))

def build(**sizes):
    with deferred_init():
        return LlamaForCausalLM(LlamaConfig(**sizes))

def place(model):
    if how == "materialize":
        materialize(model, mesh, lambda name, tensor: [Shard(0)])
    else:
        plan = Plan(mesh)
        plan.shard(".*weight", RaggedShard(), mesh="fsdp", phase=INIT)
        plan.shard(".*weight", Replicate(), mesh="fsdp", phase=RUN)
        parallelize(model, plan)

place(build(hidden_size=64, num_hidden_layers=1, vocab_size=64, intermediate_size=64))  # what is loaded on first use
model = build(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
              num_key_value_heads=8, vocab_size=128256)
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
place(model)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
shards = sum(p._local_tensor.nbytes for p in model.parameters())
print(sum(p.numel() for p in model.parameters()), shards, peak - before)
"""


def llama_growth(how: str) -> float:
    """Growth of the peak of resident memory over the bytes of this rank's shards."""
    command = [sys.executable, "-W", "ignore", "-c", _LLAMA, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    numel, shards, grown = map(int, done.stdout.split()[-3:])
    assert numel == 8_030_261_248
    return grown / shards


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--llama", action="store_true", help="also the memory of Llama-3-8B (a minute)")
    parser.add_argument("--small", action="store_true", help="small fills of DTensors in place of large ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[tuple[str, float, float, float]] = []  # name, bound, measured, median
    for dim, bound in ((0, 1.15), (1, 1.10)) if not options.small else ():
        for name, op in OPS.items():
            figures.append((f"Shard({dim}) {name}", bound, *shard_ratio(op, dim, options.turns)))
    if options.small:
        figures = list(small_fills(options.turns))
    if csrc.load("mt19937") is not None:
        figures.append(("far jump, C++ helper, ms", 2.0, *far_jump(options.turns)))
    os.environ["VESCALE_NO_NATIVE"] = "1"
    figures.append(("far jump, numpy, ms", 100.0, *far_jump(options.turns)))
    del os.environ["VESCALE_NO_NATIVE"]
    if options.llama:
        for how in ("materialize", "parallelize"):
            growth = llama_growth(how)
            figures.append((f"Llama-3-8B on 1 of 64, {how}", 1.10, growth, growth))
    if options.json:
        keys = ("figure", "bound", "measured", "median")
        print(json.dumps([dict(zip(keys, figure, strict=True)) for figure in figures]))
    else:
        print(f"{'figure':36} {'bound':>8} {'measured':>9} {'median':>9}")
        for name, bound, found, median in figures:
            print(f"{name:36} {bound:8.2f} {found:9.3f} {median:9.3f}{'' if found <= bound else '  MISSED'}")
    return int(any(found > bound for _, bound, found, _ in figures))


if __name__ == "__main__":
    sys.exit(main())
