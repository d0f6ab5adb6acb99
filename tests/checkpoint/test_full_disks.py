"""Saves to a small file system of memory that is full, has no names left, or is read-only; needs the right to mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.hf_models import saved as hf_saved
from tests.checkpoint.killing import filled, model_of
from vescale.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, export_hf, save, verify
from vescale.cli import main

_BYTES = 4 << 20
_FILES = 60


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={_BYTES},nr_inodes={_FILES}"
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root; test_crashes has a limit on file sizes instead")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path, free: int) -> Path:
    """Leave so many bytes."""
    filler = place / "filler"
    with filler.open("wb") as file:
        state = os.statvfs(place)
        file.write(bytes(max(0, state.f_bavail * state.f_frsize - free)))
    return filler


def save_or_fail(checkpoints: Checkpointer, step: int, reason: str) -> bool:
    """Whether the step was saved; if not, the error has a reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        try:
            checkpoints.save(step, model=model_of(step))
            checkpoints.wait()
        except CheckpointError as error:
            assert any(part in str(error) for part in reason.split("|")), error
            return False
    return True


def assert_right(folder: Path, steps: list[int]) -> None:
    """These steps are complete, and have their values."""
    checkpoints = Checkpointer(folder)
    assert checkpoints.steps() == steps
    for step in steps:
        model = model_of(-1)
        checkpoints.restore(model=model, step=step, rng=False)
        assert all((p == step).all() for p in model.parameters()) and not verify(folder / f"step-{step}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_number_of_bytes_left(disk: Path, asynchronous: bool) -> None:
    """From nothing at all to enough for the data but not for the manifest, and for both."""
    folder = filled(disk / "run")
    outcomes = []
    with Checkpointer(folder, asynchronous=asynchronous, keep=2) as checkpoints:
        kept, step = [1, 2], 3
        for free in (0, 4 << 10, 16 << 10, 20 << 10, 24 << 10, 28 << 10, 32 << 10, 48 << 10, 1 << 20):
            filler = fill(disk, free)
            saved = save_or_fail(checkpoints, step, "No space left on device|bytes left")
            outcomes.append(saved)
            kept = [kept[-1], step] if saved else kept
            assert_right(folder, kept)
            filler.unlink()
            step += 1
        assert save_or_fail(checkpoints, step, "")
        assert_right(folder, [kept[-1], step])
    assert outcomes[0] is False and outcomes[-1] is True
    assert sorted(os.listdir(folder)) == sorted([".lock", "latest", f"step-{kept[-1]}", f"step-{step}"])


def test_no_names_left(disk: Path) -> None:
    folder = filled(disk / "run")
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        checkpoints.save(3, model=model_of(3))
        for files in range(4):
            names = []
            with contextlib.suppress(OSError):
                for number in range(_FILES):
                    (disk / f"name {number}").touch()
                    names.append(disk / f"name {number}")
            for name in names[:files]:
                name.unlink()
            before = checkpoints.steps()
            saved = save_or_fail(checkpoints, 4 + files, "No space left on device")
            assert_right(folder, [before[-1], 4 + files] if saved else before)
            for name in names[files:]:
                name.unlink()
        assert save_or_fail(checkpoints, 9, "")


def test_exports_leave_nothing_half_written(disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files of an earlier export stay as they were, and a new folder is not left behind."""
    model = hf_saved("llama", tmp_path / "hf")
    save(tmp_path / "step", model=model)
    export_hf(model, disk / "before")
    before = {path.name: path.read_bytes() for path in (disk / "before").iterdir()}
    size = sum(map(len, before.values()))
    config = f"hf:{tmp_path / 'hf' / 'config.json'}"
    for target in (disk / "before", disk / "new"):
        for free in (0, size // 2):
            filler = fill(disk, free)
            with pytest.raises(CheckpointError, match="No space left on device"):
                export_hf(model, target, max_shard_size=size // 4)
            assert main(["ckpt", "export", str(tmp_path / "step"), str(target), "--model", config]) == 2
            assert "No space left on device" in capsys.readouterr().err
            assert {path.name: path.read_bytes() for path in (disk / "before").iterdir()} == before
            assert not (disk / "new").exists()
            filler.unlink()
    for target in (disk / "before", disk / "new"):
        target.mkdir(exist_ok=True)
        (target / "model-00001-of-00009.safetensors.part").write_bytes(b"of a job that was killed")
        export_hf(model, target)
        assert {path.name for path in target.iterdir()} == before.keys()


def test_a_read_only_disk(disk: Path) -> None:
    folder = filled(disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        assert_right(folder, [1, 2])
        for asynchronous in (False, True):
            with pytest.raises(CheckpointError, match=r"cannot be written to: .*Read-only file system"):
                Checkpointer(folder, asynchronous=asynchronous).save(3, model=model_of(3))
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    with Checkpointer(folder, asynchronous=False, keep=2) as checkpoints:
        assert save_or_fail(checkpoints, 3, "")
        assert_right(folder, [2, 3])
