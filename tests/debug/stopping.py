"""The program that the tests of breakpoints run under torchrun."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale
from vescale import Plan, parallelize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(x))
        own = dist.get_rank()
        odd = torch.arange(200.0).view(10, 20)
        if own == 2:
            odd[7, 3] = -1
        if self.stops:
            vescale.breakpoint()
        out = self.down(hidden)
        return out * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def in_model() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan = Plan(mesh).shard(r"blocks.\d.up.(weight|bias)", Shard(0), mesh="tp")
    plan.shard(r"blocks.\d.down.weight", Shard(1), mesh="tp").shard(r"blocks.\d.down.<out>", Replicate(), mesh="tp")
    model: Any = parallelize(Net(), plan)
    model.blocks[1].stops = True
    model(torch.ones(2, 6)).backward()


def in_loop() -> None:
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        if step < 2:
            breakpoint()  # Python's own, routed by PYTHONBREAKPOINT
        time.sleep(0.01)


def conditional() -> None:
    for step in range(4):
        vescale.breakpoint(rank="all", when=lambda step=step: step == 2 and dist.get_rank() == 3)


def uneven() -> None:
    x = torch.ones(1)
    vescale.breakpoint()
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    once = x.clone()
    if dist.get_rank() != 0:
        dist.all_reduce(once)
    time.sleep(0.01)


def in_stages() -> None:
    """All stages stop in the first block of theirs, in the second step: the first one, whose ranks may wait for each other
    for long on a busy machine, has no time limit."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    plan = Plan(mesh).pipeline(split_before=["blocks.1"], microbatches=2, loss="out")
    model: Any = parallelize(Net(), plan)
    model.step(x=torch.ones(4, 6))
    os.environ["VESCALE_TIMEOUT"] = "4"
    vescale.debug.hang_report()
    for block in model.blocks:
        block.stops = True
    model.step(x=torch.ones(4, 6))


def failing() -> None:
    with vescale.debug.on_exception():
        dist.all_reduce(torch.ones(1))
        lost = dist.get_rank() * 11
        if lost == 11:
            raise ValueError(f"planted {lost}")
        dist.barrier()


def of_the_page() -> None:
    """The block of docs/debug.md."""
    page = Path(__file__).parent.parent.parent / "docs" / "debug.md"
    (block,) = re.findall(r"^```python\n(vescale\.breakpoint.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)

    def program() -> None:
        raise ValueError("planted")

    loss = torch.tensor(float("nan") if dist.get_rank() == 3 else 1.0)
    exec(compile(block, str(page), "exec"), {"vescale": vescale, "loss": loss, "main": program})


def main(what: str) -> None:
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    dist.barrier()  # a prompt comes after these lines
    globals()[what]()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
