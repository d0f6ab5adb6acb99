"""What it costs that boundaries keep aliasing: processor time of a launch-bound step with and without the links between the
tensors before and behind each boundary that moves data, and of the writes that are looked for when a module ends.

``python -m benchmarks.aliasing``: the model of :mod:`benchmarks.checks` with entries that move data around every linear
layer, on a fake process group, where collectives are free and only the host's work shows. Pairs of steps, by turns; the
median of the ratios. No module writes to its inputs, as in most models.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale
from benchmarks.checks import TOKENS, VOCABULARY, Model, compare_pairs
from vescale.runtime._placing import Placing, Stages


def without_links(switch: dict[str, bool]) -> None:
    """While ``switch["on"]`` is false, conversions at boundaries link nothing, and no write to an input is looked for."""
    convert: Any = Stages.convert
    note = Placing._place_and_note

    def linked(self: Stages, x: Any, requester: str, outdated: Callable[[], None]) -> Any:
        return convert(self, x, requester, outdated if switch["on"] else None)

    def noted(self: Placing, placed: Any, x: torch.Tensor) -> torch.Tensor:
        return note(self, placed, x) if switch["on"] else self._place(x)

    Stages.convert = linked  # type: ignore[method-assign]
    Placing._place_and_note = noted  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan = vescale.Plan(mesh)
    for name in ("q", "k", "v", "up"):
        plan.shard(rf"blocks\.\d+\.{name}.weight", Shard(0)).shard(rf"blocks\.\d+\.{name}.<in>", Replicate())
    for name in ("o", "down"):
        plan.shard(rf"blocks\.\d+\.{name}.weight", Shard(1)).shard(rf"blocks\.\d+\.{name}.<out>", Shard(1))
    plan.shard("embedding.<out>", Shard(1)).shard("head.<in>", Replicate())
    model = vescale.parallelize(Model(options.layers), plan)
    tokens, switch = torch.randint(0, VOCABULARY, (2, TOKENS)), {"on": True}
    without_links(switch)

    def step(linked: bool) -> float:
        switch["on"] = linked
        begin = time.thread_time()
        model(tokens, tokens).backward()
        model.zero_grad()
        return time.thread_time() - begin

    compare_pairs(step, options.pairs, "links")
    print(f"{6 * options.layers + 2} entries")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
