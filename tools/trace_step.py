"""The path of a steady ``fully_shard`` step: ``python tools/trace_step.py [--functions]``.

Runs three blocks of two Linear layers on two ranks, with vescale's ``fully_shard`` and with PyTorch's, and prints, for
forward and backward of the sixth step and for the seventh with clipping and AdamW: the files and functions of the engine
that are entered, the calls, and how often a call enters another file than the one before. ``--functions`` lists both.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard

RANKS = 2


class CallPath:
    """Counts the calls of functions below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files, self.functions = Counter[str](), Counter[tuple[str, str]]()
        self.num_changes, self._last = 0, ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.folder):
            return
        file = code.co_filename[len(self.folder) + 1 :]
        self.files[file] += 1
        self.functions[file, code.co_qualname] += 1
        self.num_changes += file != self._last
        self._last = file

    def of(self, step: Callable[[], object]) -> CallPath:
        sys.setprofile(self)
        try:
            step()
        finally:
            sys.setprofile(None)
        return self

    def __str__(self) -> str:
        calls = sum(self.files.values())
        return f"{len(self.files)} files, {len(self.functions)} functions, {calls} calls, {self.num_changes} changes of file"


def trace(rank: int, store: str, shows_functions: bool) -> None:
    import vescale
    from vescale.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh, x = init_device_mesh("cpu", (RANKS,)), torch.ones(2, 8)
    ours, theirs = str(Path(vescale.__file__).parent), str(Path(torch.__file__).parent / "distributed" / "fsdp")
    engines: list[tuple[str, Any, str, Any]] = [
        ("vescale", fully_shard, ours, vescale.optim.clip_grad_norm_),
        ("FSDP2", stock_fully_shard, theirs, nn.utils.clip_grad_norm_),
    ]
    for name, shard, folder, clip in engines:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)])
        for block in model:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        def backward(model: nn.Module = model) -> None:
            model(x).sum().backward()

        def update(model: nn.Module = model, clip: Any = clip, optimizer: Any = optimizer) -> None:
            clip(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            backward()
            update()
        found = CallPath(folder).of(backward)
        update()
        whole = CallPath(folder).of(lambda backward=backward, update=update: (backward(), update()))
        if rank == 0:
            print(f"{name}: forward and backward: {found}\n{name}: with clipping and AdamW: {whole}", flush=True)
            for file, count in found.files.most_common() if shows_functions else ():
                called = [f"{n} {number}" for (of, n), number in found.functions.most_common() if of == file]
                print(f"  {file} {count}: {', '.join(called)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="list files and functions")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (os.path.join(folder, "store"), parser.parse_args().functions)
        multiprocessing.spawn(trace, arguments, nprocs=RANKS)


if __name__ == "__main__":
    main()
