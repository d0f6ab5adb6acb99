"""What the checks of a script cost (:mod:`vescale.checks`): processor time of a launch-bound step with and without them.

``python benchmarks/checks.py``: a small tensor-parallel Llama-like model on a fake process group, where collectives are free
and only the host's work shows. Pairs of steps, by turns; the median of the ratios. The checks sample inputs, look for
backwards and send a digest in each step, as on real ranks, which they do not wait for here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale
from vescale.runtime import Runtime

HIDDEN, TOKENS, VOCABULARY = 64, 16, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def compare_pairs(step: Callable[[bool], float], num_pairs: int, what: str) -> None:
    """Print what ``what`` costs: medians of pairs of ``step(True)``, with it, and ``step(False)``, both in seconds."""
    for _ in range(20):
        step(True), step(False)
    ratios, times = [], []
    for pair in range(num_pairs):
        found = {is_on: step(is_on) for is_on in ((True, False) if pair % 2 else (False, True))}
        ratios.append(found[True] / found[False])
        times.append(found)
    without = statistics.median(found[False] for found in times)
    added = statistics.median(found[True] - found[False] for found in times)
    print(f"a step without {what}: {without * 1e3:.2f} ms; with {what} {statistics.median(ratios):.4f} times that")
    print(f"added: {added * 1e6:.0f} us a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=150)
    options = parser.parse_args()
    os.environ["VESCALE_CHECK_EVERY"] = "0"  # descriptions go to a store, which is not there
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan = vescale.Plan(mesh)
    for name in ("q", "k", "v", "up"):
        plan.shard(rf"blocks\.\d+\.{name}.weight", Shard(0))
    for name in ("o", "down"):
        plan.shard(rf"blocks\.\d+\.{name}.weight", Shard(1))
        plan.shard(rf"blocks\.\d+\.{name}.<out>", Replicate())
    model = vescale.parallelize(Model(options.layers), plan)
    runtime = Runtime.of(model)
    assert runtime is not None
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS))

    def step(checked: bool) -> float:
        runtime.checks.is_on = checked
        begin = time.thread_time()
        model(tokens, tokens).backward()
        model.zero_grad()
        return time.thread_time() - begin

    compare_pairs(step, options.pairs, "checks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
