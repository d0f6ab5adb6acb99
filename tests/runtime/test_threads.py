"""Models on several threads while another thread clears tables and registers rules: one thread's numbers, bit for bit.

The second of two ranks is not there: what is compared is what this rank computes, with and without other threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from tests.debug.jobs import run_processes
from tests.device import device_type
from tests.examples import NIGHTLY
from vescale import parallelize
from vescale.compat import clear_sharding_caches, local_of
from vescale.ops import OpCall, register_rule
from vescale.plans import Plan

SECONDS = 2.0 if NIGHTLY else 1.0
aten = torch.ops.aten


class Block(nn.Module):
    """Boundaries that move data, writes in place, views of a sharded dim, and a checkpoint of either kind."""

    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.reentrant = nn.LayerNorm(width), reentrant

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = F.relu(self.up(y), inplace=True)
        return x + self.down(y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is not None and torch.is_grad_enabled():
            x = checkpoint(self.mix, x, use_reentrant=self.reentrant)
        else:
            x = self.mix(x)
        with torch.no_grad():
            kept = x.detach().clone()
            row = kept[1]
            kept.mul_(2)
        return x + row


class Stack(nn.Module):
    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, reentrant) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sin().square().mean()


def made(number: int, mesh: Any) -> nn.Module:
    torch.manual_seed(number)
    model = Stack(16 * (1 + number % 3), (None, True, False)[number % 3]).double()
    plan = Plan(mesh).shard(r"blocks.\d+.up.weight", Shard(0)).shard(r"blocks.\d+.up.bias", Shard(0))
    plan.shard(r"blocks.\d+.down.weight", Shard(1)).shard(r"blocks.\d+.norm.<in>", Shard(1 if number % 2 else 0))
    plan.shard(r"blocks.\d+.up.<in>", Replicate()).shard(r"blocks.\d+.down.<out>", Replicate())
    return parallelize(model, plan)


def steps(model: nn.Module, width: int, rows: Iterable[int]) -> list[torch.Tensor]:
    """Losses and gradients. Other numbers of rows are other calls for the tables; some are worked on without the lock."""
    found = []
    for count in rows:
        model.zero_grad()
        x = torch.linspace(-1, 1, count * 8 * width, dtype=torch.float64).view(count, 8, width).requires_grad_()
        loss = model(x)
        loss.backward()
        found.append(local_of(loss).detach().clone())
        found += [local_of(parameter.grad).clone() for parameter in model.parameters()]
    return found


def on_threads() -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    models = [made(number, mesh) for number in range(6)]
    width, rows = [16 * (1 + number % 3) for number in range(6)], [range(2, 60, 10 + number) for number in range(6)]
    expected = [{n: steps(model, w, [n]) for n in r} for model, w, r in zip(models, width, rows)]
    problems: list[str] = []
    done = threading.Event()

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                problems.append(f"{type(error).__name__}: {error}"[:2000])
                done.set()

        return threading.Thread(target=run)

    def train(number: int) -> None:
        for count in rows[number]:
            if done.is_set():
                return
            found = steps(models[number], width[number], [count])
            for index, (one, other) in enumerate(zip(expected[number][count], found, strict=True)):
                assert torch.equal(one, other), f"model {number}, {count} rows, tensor {index}"

    def disturb() -> None:
        clear_sharding_caches()
        done.wait(0.002)

    def rule(call: OpCall) -> Any:
        return None

    def register() -> None:
        register_rule(aten.lgamma.default, rule)
        done.wait(0.01)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [guarded(lambda number=number: train(number)) for number in range(len(models))]  # type: ignore[misc]
    threads += [guarded(disturb), guarded(register)]
    try:
        for thread in threads:
            thread.start()
        done.wait(float(os.environ.get("VESCALE_TEST_SECONDS", SECONDS)))
        done.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not problems, problems


def test_tables_under_threads(tmp_path: Path) -> None:
    """In a process of its own, which a wrong access to memory would end."""
    done = run_processes(on_threads, tmp_path, world_size=1, limit=300)
    assert done.codes == [0], done.text


@pytest.mark.slow
def test_tables_under_threads_without_helpers() -> None:
    """In a new interpreter, which reads the environment variable when it imports vescale."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", f"from {__name__} import on_threads; on_threads()"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VESCALE_DISPATCH": "stock", "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
