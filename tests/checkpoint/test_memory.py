"""Loading needs little memory beside the tensors that it fills, and nothing of a save outlives its process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.killing import model_of
from tests.checkpoint.test_crashes import in_child
from tests.ranks import RankPools
from vescale.checkpoint import Checkpointer, load, load_hf, open_stored, read_tensors, save
from vescale.checkpoint import _reader as reader
from vescale.rng import deferred_init

_SIDE, _NUMBER = 2048, 8
"""Tensors of 16 MiB in float32: all of them are more than what may be used beside the largest one."""
_ALLOWED = 64 << 20


def resident() -> tuple[int, int]:
    """(now, most since it was reset) in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return values["VmRSS"], values["VmHWM"]


def growth_of_load(folder: str, kind: str, side: int = _SIDE) -> None:
    """Fill tensors whose memory is there already; ``kind``: how bytes become values. A small load comes first: it brings the
    program's own pages into memory."""
    if side == _SIDE:
        growth_of_load(folder, kind, 8)
    dtype = torch.float64 if kind == "cast" else torch.float32
    targets = {f"tensors.{number}": torch.ones(side, side, dtype=dtype) for number in range(_NUMBER)}
    if kind == "transposed":
        targets = {name: tensor.t() for name, tensor in targets.items()}
    stored = open_stored(os.path.join(folder, str(side)))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()[0]
    read_tensors(stored, targets, cast=kind == "cast")
    extra = resident()[1] - before
    largest = max(tensor.nbytes for tensor in targets.values())
    assert extra <= largest + _ALLOWED, f"{kind}: {extra >> 20} MiB"
    for number, tensor in enumerate(targets.values()):
        assert (tensor == number).all()


def stored(folder: Path) -> str:
    for side in (8, _SIDE):
        save(folder / str(side), tensors={str(n): torch.full((side, side), float(n)) for n in range(_NUMBER)})
    return str(folder)


def test_memory_of_load(tmp_path: Path) -> None:
    folder = stored(tmp_path / "one")
    for kind in ("direct", "transposed", "cast"):
        assert in_child(lambda kind=kind: growth_of_load(folder, kind)) == 0, kind  # type: ignore[misc]


def test_memory_of_load_on_ranks(ranks: RankPools, tmp_path: Path) -> None:
    """One rank reads, and broadcasts."""
    ranks.run(growth_of_load, stored(tmp_path / "one"), "transposed", world_size=2)


def growth_of_load_hf(folder: str, kind: str, side: int = _SIDE) -> None:
    """``kind``: of the model. What a deferred one needs for its parameters is no extra memory."""
    if side == _SIDE:
        growth_of_load_hf(folder, kind, 8)
    with deferred_init() if kind == "deferred" else contextlib.nullcontext():
        model = nn.ParameterDict({str(n): torch.ones(side, side) for n in range(_NUMBER)})
    if kind == "cast":
        model = model.to(torch.bfloat16)
    files = os.path.join(folder, f"{side}.safetensors")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()[0]
    load_hf(model, files)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    extra = resident()[1] - before - (sum(sizes) if kind == "deferred" else 0)
    if side == _SIDE:  # before, modules are imported
        assert extra <= max(sizes) + _ALLOWED, f"{kind}: {extra >> 20} MiB"
    for name, parameter in model.items():
        assert (parameter == int(name)).all()


def test_memory_of_load_hf(tmp_path: Path) -> None:
    """Of 128 MiB in tensors of 16."""
    for side in (8, _SIDE):
        save_file(
            {str(n): torch.full((side, side), float(n)) for n in range(_NUMBER)}, tmp_path / f"{side}.safetensors"
        )
    for kind in ("plain", "cast", "deferred"):
        assert in_child(lambda kind=kind: growth_of_load_hf(str(tmp_path), kind)) == 0, kind  # type: ignore[misc]


def test_the_writer_ends_with_a_killed_process(tmp_path: Path) -> None:
    """In the middle of a large save; the next job has the folder for itself."""
    folder, pid_file = tmp_path / "run", tmp_path / "pid"

    def work() -> None:
        checkpoints = Checkpointer(folder, keep=2)
        checkpoints.save(1, model=model_of(1))
        checkpoints.wait()
        pid_file.write_text(str(checkpoints._saver.writer_pid))
        checkpoints.save(2, model=model_of(2, 3000))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid_file.read_text()}").exists():
        assert time.monotonic() < deadline, "the writer is still there"
        time.sleep(0.02)
    model = model_of(-1)
    assert load(folder, model=model) is not None and all((p == 1).all() for p in model.parameters())
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        checkpoints.save(3, model=model_of(3))
        assert checkpoints.steps() == [1, 3]


def test_the_bound_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that keeps as much as it has read."""
    folder, original, held = stored(tmp_path / "one"), reader._fetch, []

    def hoard(files: Any, batch: Any) -> None:
        held.append(torch.ones(_SIDE, _SIDE))
        original(files, batch)

    monkeypatch.setattr(reader, "_fetch", hoard)
    assert in_child(lambda: growth_of_load(folder, "direct")) == 1
