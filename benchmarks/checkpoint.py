"""Saving and loading against ``torch.distributed.checkpoint``, the blocking part of asynchronous saves, and planning.

``python benchmarks/checkpoint.py [--mib 512] [--repeats 5]``: one process, by turns, medians of ratios of wall time and of
processor time. The files of both are in the page cache when they are read.

Both compute checksums while they write. By default DCP waits until its files are on the disk (``sync_files=True``), but not
until the names of its files are; ``save`` waits for both. The second pair of figures is without any wait on either side.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.checkpoint import Checkpointer, _disk, load, save
from vescale.checkpoint._rank_file import layout_of
from vescale.checkpoint._saving import owned
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


@contextlib.contextmanager
def without_syncs() -> Iterator[None]:
    """``save`` leaves it to the system when bytes come to the disk."""
    names = ("sync", "sync_folder", "start_sync")
    kept = {name: getattr(_disk, name) for name in names}
    for name in names:
        setattr(_disk, name, lambda *_: None)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(_disk, name, original)


def against_dcp(folder: Path, mib: int, repeats: int) -> None:
    model = model_of(mib)
    state = dict(model.state_dict())

    def dcp_save(path: Path, sync: bool) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=sync), no_dist=True)

    def save_without_syncs(path: Path) -> None:
        with without_syncs():
            save(path, model=model)

    pairs: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
        "save": (lambda path: save(path, model=model), lambda path: dcp_save(path, True)),
        "load": (lambda path: load(path, model=model), lambda path: dcp.load(state, checkpoint_id=path, no_dist=True)),
        "save without syncs": (save_without_syncs, lambda path: dcp_save(path, False)),
    }
    wall: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    processor: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for repeat in range(repeats):
        for name, works in pairs.items():
            paths = [folder / f"{name.replace('load', 'save')} {repeat} {side}" for side in ("ours", "dcp")]
            found: dict[int, tuple[float, float]] = {}
            for side in (0, 1) if repeat % 2 else (1, 0):
                start = time.process_time()
                took = timed(functools.partial(works[side], paths[side]))
                found[side] = took, time.process_time() - start
            wall[name].append((found[0][0], found[1][0]))
            processor[name].append((found[0][1], found[1][1]))
        for made in folder.iterdir():
            shutil.rmtree(made)
    for name in pairs:
        print(
            f"{name} of {mib} MiB: {ratio(wall[name]):.2f} of DCP's wall time, {ratio(processor[name]):.2f} of its "
            f"processor time ({statistics.median(ours for ours, _ in wall[name]):.2f} s)"
        )


def ratio(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(ours / theirs for ours, theirs in pairs)


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
        list(layout_of({name: snapshot.blocks[name] for name in sorted(own)}))
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
