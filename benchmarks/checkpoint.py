"""Saving and loading against ``torch.distributed.checkpoint``, the blocking part of asynchronous saves, and planning.

``python benchmarks/checkpoint.py [--mib 512] [--repeats 5]``: one process, by turns, medians of ratios. The files of both
are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.checkpoint import Checkpointer, load, save
from vescale.checkpoint._ownership import owned
from vescale.checkpoint._saving import _layout
from vescale.checkpoint._snapshot import take_snapshot
from vescale.compat import make_dtensor, make_spec
from vescale.placements import RaggedShard, local_region, normalize_placements


def model_of(mib: int) -> nn.Module:
    """Layers of 16 MiB."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=index % 2 == 0) for index in range(max(1, mib // 16))))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def against_dcp(folder: Path, mib: int, repeats: int) -> None:
    model = model_of(mib)
    state = dict(model.state_dict())
    ratios: dict[str, list[float]] = {"save": [], "load": []}
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    for repeat in range(repeats):
        own, other = folder / f"ours {repeat}", folder / f"dcp {repeat}"
        works = [
            (
                lambda own=own: save(own, model=model),
                lambda other=other: dcp.save(state, checkpoint_id=other, no_dist=True),
            ),
            (
                lambda own=own: load(own, model=model),
                lambda other=other: dcp.load(state, checkpoint_id=other, no_dist=True),
            ),
        ]
        for name, (ours, theirs) in zip(ratios, works):
            order = (ours, theirs) if repeat % 2 else (theirs, ours)
            times = {work: timed(work) for work in order}
            ratios[name].append(times[ours] / times[theirs])
            seconds[name].append(times[ours])
        for made in folder.iterdir():
            shutil.rmtree(made)
    for name, found in ratios.items():
        print(
            f"{name} of {mib} MiB: {statistics.median(found):.2f} of DCP's wall time "
            f"({statistics.median(seconds[name]):.2f} s)"
        )


def blocking(folder: Path, mib: int, repeats: int) -> None:
    model = model_of(mib)
    copies = [p.detach().clone() for p in model.parameters()]
    found, copied = [], []
    with Checkpointer(folder / "async", keep=2) as checkpoints:
        for step in range(repeats + 1):
            took = timed(lambda step=step: checkpoints.save(step, model=model))  # type: ignore[misc]
            checkpoints.wait()
            memory = timed(lambda: [c.copy_(p.detach()) for c, p in zip(copies, model.parameters())])
            if step:  # the first one makes the memory
                found.append(took)
                copied.append(memory)
            else:
                print(f"first asynchronous save: {took * 1000:.0f} ms")
    print(
        f"asynchronous save of {mib} MiB blocks {statistics.median(found) * 1000:.0f} ms; a copy in memory takes "
        f"{statistics.median(copied) * 1000:.0f} ms"
    )


def planning(ranks: int = 1024, tensors: int = 1000) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=517, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    shape = (4096, 64)
    (placement,) = normalize_placements((RaggedShard(),), shape, mesh)
    region = local_region(shape, (placement,), (ranks,), (517,))
    spec = make_spec(mesh, (placement,), shape, (64, 1), torch.float32)
    values: dict[str, DTensor] = {f"t{i}": make_dtensor(torch.zeros(region.local_shape), spec) for i in range(tensors)}
    times = []
    for _ in range(5):
        start = time.thread_time()
        snapshot = take_snapshot(None, None, {"tensors": values})
        own = owned(snapshot.blocks, dict.fromkeys(snapshot.blocks))
        list(_layout({name: snapshot.blocks[name] for name in sorted(own)}))
        times.append(time.thread_time() - start)
    print(
        f"planning a save of {tensors} tensors as one of {ranks} ranks: {statistics.median(times) * 1000:.0f} ms of CPU time"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        planning()
        against_dcp(Path(name), options.mib, options.repeats)
        blocking(Path(name), options.mib, options.repeats)
