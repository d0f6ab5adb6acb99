"""Named pipes and devices in the place of files, and manifests that describe what cannot be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from vescale.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, load, load_hf, save, verify
from vescale.checkpoint._step_folder import parse, serialize
from vescale.cli import main


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Opening a named pipe would wait for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("waits for a writer of a named pipe")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 6)


def pipe_at(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def test_pipes_in_a_step(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", model=model_of())
    for name in ("manifest.json", "data-00000.bin"):
        path = tmp_path / "step-2" / name
        original = path.read_bytes()
        pipe_at(path)
        assert verify(tmp_path / "step-2")
        assert main(["ckpt", "verify", str(tmp_path)]) == 1
        with pytest.warns(CheckpointWarning, match="step 2 is skipped"):
            assert Checkpointer(tmp_path).restore(model=model_of())["step"] == 1  # type: ignore[index]
        with pytest.raises(CheckpointError, match="named pipe"):
            Checkpointer(tmp_path, verify="none").restore(model=model_of())
        path.unlink()
        path.write_bytes(original)
    assert not verify(tmp_path)


def test_pipes_in_other_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {name: tensor.detach().clone() for name, tensor in model_of().state_dict().items()}
    for name in ("file", "index", "config"):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
    pipe_at(tmp_path / "file" / "model.safetensors")
    pipe_at(tmp_path / "index" / "model.safetensors.index.json")
    pipe_at(tmp_path / "config" / "config.json")
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path in (tmp_path / "dcp").glob("*.distcp"):
        pipe_at(path)
    torch.save(state, tmp_path / "a.pt")
    pipe_at(tmp_path / "a.pt")
    for name in ("file/model.safetensors", "file", "index", "dcp"):
        with pytest.raises(CheckpointError, match="named pipe"):
            load(tmp_path / name, model=model_of())
        assert main(["ckpt", "show", str(tmp_path / name)]) == 2
        assert "named pipe" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="named pipe"):
        load_hf(model_of(), tmp_path / "config")
    for path in (tmp_path / "a.pt", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a checkpoint in a known format"):
            load(path, model=model_of())


def _with(where: str, value: Any) -> Callable[[dict[str, Any]], None]:
    places = {"sizes": 1, "file": 2, "start": 3}

    def change(manifest: dict[str, Any]) -> None:
        entry = manifest["tensors"]["model.weight"]
        if where in places:
            entry["boxes"][0][places[where]] = value
        else:
            entry[where] = value

    return change


IMPOSSIBLE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "far": (_with("start", 1 << 40), "no such bytes"),
    "before": (_with("start", -64), "no such bytes"),
    "file": (_with("file", 7), "file 7, which has no such bytes"),
    "last file": (_with("file", -1), "file -1, which has no such bytes"),
    "small": (_with("sizes", [3, 6]), "do not cover it exactly"),
    "twice": (
        lambda m: m["tensors"]["model.weight"]["boxes"].append(m["tensors"]["model.weight"]["boxes"][0]),
        "overlap",
    ),
    "large": (_with("shape", [10**9, 10**9]), "do not cover it exactly"),
    "outside": (_with("shape", [4, 9]), "extend past it"),
    "copies": (lambda m: m["files"][0].update(copies=[["gone", [3], 0, "0"]]), "a copy of gone"),
    "no tensors": (lambda m: m.pop("tensors"), "lacks tensors"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_manifests(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a checksum that is right: ``verify`` names the fault, and loading ends in an error or does not need it."""
    change, message = IMPOSSIBLE[name]
    save(tmp_path / "one", model=model_of())
    path = tmp_path / "one" / "manifest.json"
    manifest = parse(path.read_bytes())
    del manifest["crc32"]
    change(manifest)
    path.write_bytes(serialize(manifest))
    assert any(message in line for line in verify(tmp_path / "one"))
    assert main(["ckpt", "verify", str(tmp_path / "one")]) == 1
    assert message in capsys.readouterr().out
    if name != "copies":
        with pytest.raises(CheckpointError):
            load(tmp_path / "one", model=model_of())
