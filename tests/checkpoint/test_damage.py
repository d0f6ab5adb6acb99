"""Flipped bits, files that are cut off or missing, at every kind of position; what fits and what does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vescale.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointWarning,
    load,
    open_stored,
    read_tensors,
    save,
    verify,
)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.register_buffer("empty", torch.zeros(0, 4))
    return model


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_every_bit_of_every_file(tmp_path: Path) -> None:
    """Of a small checkpoint: values, the zeros between them, and the manifest, at each byte one bit."""
    save(tmp_path / "one", model=model_of(), note="x")
    assert not verify(tmp_path / "one")
    for name in ("manifest.json", "data-00000.bin"):
        path = tmp_path / "one" / name
        original = path.read_bytes()
        stride = 7 if name == "manifest.json" else 97
        for position in {*range(0, len(original), stride), *range(len(original) - 12, len(original))}:
            flip(path, position, position % 8)
            assert verify(tmp_path / "one"), (name, position)
            if name == "manifest.json":
                with pytest.raises(CheckpointError, match="manifest"):
                    load(tmp_path / "one", model=model_of())
            path.write_bytes(original)
    assert not verify(tmp_path / "one")


def test_files_cut_off_and_missing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, model=model_of())
        checkpoints.save(2, model=model_of())
    newest = tmp_path / "step-2"
    for name in os.listdir(newest):
        path = newest / name
        original = path.read_bytes()
        for length in (0, 1, len(original) // 2, len(original) - 1, len(original) + 1, None):
            if length is None:
                path.unlink()
            else:
                path.write_bytes((original + b"\0")[:length])
            assert verify(newest)
            with pytest.warns(CheckpointWarning, match="step 2 is skipped"):
                found = Checkpointer(tmp_path).restore(model=model_of())
            assert found is not None and found["step"] == 1
            with pytest.raises(CheckpointError, match=r"step 2 is not complete: .*the complete steps are \[1\]"):
                Checkpointer(tmp_path).restore(model=model_of(), step=2)
            assert Checkpointer(tmp_path).steps() == [1]
            path.write_bytes(original)
    assert Checkpointer(tmp_path).steps() == [1, 2]


def test_checksums_on_restore(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, model=model_of())
        checkpoints.save(2, model=model_of())
    flip(tmp_path / "step-2" / "data-00000.bin", 3)
    with pytest.warns(CheckpointWarning, match="passed by: .*crc32"):
        found = Checkpointer(tmp_path, verify="checksums").restore(model=model_of())
    assert found is not None and found["step"] == 1
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpointer(tmp_path, verify="checksums").restore(model=model_of(), step=2)


def test_a_file_cut_off_behind_the_check(tmp_path: Path) -> None:
    """Never zeros instead of an error."""
    save(tmp_path / "one", model=model_of())
    stored = open_stored(tmp_path / "one")
    os.truncate(tmp_path / "one" / "data-00000.bin", 70)
    with pytest.raises(CheckpointError, match="ends at byte 70"):
        read_tensors(stored, {f"model.{name}": p for name, p in model_of().state_dict().items()})


def test_nothing_saved(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "none")
    assert checkpoints.restore(model=model_of()) is None and checkpoints.steps() == []
    with pytest.raises(CheckpointError, match=r"has no step 3; it has \[\]"):
        checkpoints.restore(model=model_of(), step=3)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "none", model=model_of())
    with pytest.raises(CheckpointError, match="not a checkpoint in a known format"):
        load(tmp_path, model=model_of())


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    saved = model_of()
    save(tmp_path / "one", model=saved)
    other = model_of()
    other[0] = nn.Linear(7, 6)
    other.scales = nn.Parameter(torch.zeros(()))  # type: ignore[assignment]
    del other.scale
    other[2].to(torch.bfloat16)
    before = {name: p.clone() for name, p in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "one", model=other)
    text = str(caught.value)
    assert "model.scales: not in the checkpoint (nearest: model.scale" in text
    assert "model.scale: only in the checkpoint (nearest: model.scales" in text
    assert "model.0.weight: the checkpoint has shape (5, 7) float32, expected shape (6, 7) float32" in text
    assert "model.2.weight: the checkpoint has shape (3, 5) float32, expected shape (3, 5) bfloat16" in text
    assert all(torch.equal(p, before[name]) for name, p in other.state_dict().items())
    found = load(tmp_path / "one", model=other, strict=False, cast=True)["not_loaded"]
    assert found["missing"] == ["model.scales"] and found["surplus"] == ["model.scale"]
    assert list(found["misshapen"]) == ["model.0.bias", "model.0.weight"]
    assert torch.equal(other[2].weight, saved[2].weight.bfloat16())


def test_optimizers(tmp_path: Path) -> None:
    """Other groups, states that are not there yet or any more, options that are tensors."""
    model = model_of()
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight, model.scale]}, {"params": [model[0].bias], "lr": 3.0}], lr=torch.tensor(0.5)
    )
    save(tmp_path / "early", model=model, optimizer=optimizer)
    model(torch.randn(4, 7)).sum().backward()
    model.scale.grad = torch.tensor(1.0)
    optimizer.step()
    save(tmp_path / "late", model=model, optimizer=optimizer)
    other = model_of()
    again = torch.optim.AdamW([other[0].bias], lr=0.1)
    again.add_param_group({"params": [other.scale, other[0].weight]})  # another order of groups and parameters
    load(tmp_path / "late", model=other, optimizer=again)
    assert again.param_groups[0]["lr"] == 3.0 and float(again.param_groups[1]["lr"]) == 0.5
    for ours, theirs in (
        (other[0].weight, model[0].weight),
        (other.scale, model.scale),
        (other[0].bias, model[0].bias),
    ):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(again.state[ours][key], value), key
    load(tmp_path / "early", model=other, optimizer=again)
    assert not any(again.state.values())
    with pytest.raises(CheckpointError, match=r"has no optimizer\.second; it has"):
        load(tmp_path / "late", model=other, optimizer={"second": again})
    with pytest.raises(CheckpointError, match="is not one of the model's"):
        save(tmp_path / "x", model=model_of(), optimizer=optimizer)


def test_what_is_saved_beside(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "tuple": (1, [2.5, float("inf")], {"a": None, 3: b"x"}),
        "dtype": torch.bfloat16,
        "tensor": torch.arange(5, dtype=torch.int16),
        "complex": 1 + 2j,
        "$odd": {"$tuple": [1]},
    }
    generator = torch.Generator().manual_seed(5)
    expected = torch.randn(3, generator=torch.Generator().manual_seed(5))
    save(tmp_path / "one", values=values, generator=generator)
    torch.randn(7, generator=generator)
    found = load(tmp_path / "one", generator=generator)["values"]
    assert torch.equal(found.pop("tensor"), values.pop("tensor")) and found == values
    assert torch.equal(torch.randn(3, generator=generator), expected)
    with pytest.raises(CheckpointError, match=r"thing\.0 is a builtins\.object"):
        save(tmp_path / "two", thing=[object()])
    with pytest.raises(CheckpointError, match=r"'step' is a name that checkpoints use themselves"):
        save(tmp_path / "two", step=1)
    with pytest.raises(CheckpointError, match="nothing saved as 'other'"):
        load(tmp_path / "one", other=generator)


def test_random_state(tmp_path: Path) -> None:
    import random

    import numpy as np

    save(tmp_path / "one", note=1)
    expected = torch.rand(2), np.random.rand(2), random.random()
    load(tmp_path / "one", rng=False)
    assert not torch.equal(torch.rand(2), expected[0])
    load(tmp_path / "one")
    assert torch.equal(torch.rand(2), expected[0]) and (np.random.rand(2) == expected[1]).all()
    assert random.random() == expected[2]


def test_the_default_device_and_dtype_do_not_count(tmp_path: Path) -> None:
    """Scripts set them for their models; values on the way are in memory of the host, and have the dtypes of the files."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model[0](torch.ones(1, 7)).sum().backward()
    optimizer.step()
    other = model_of()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    try:
        save(tmp_path / "one", model=model, optimizer=optimizer, values=model[0].weight)
        new = torch.optim.AdamW(other.parameters(), lr=1.0)
        found = load(tmp_path / "one", model=other, optimizer=new)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found["values"], model[0].weight) and torch.equal(other[0].weight, model[0].weight)
    assert new.param_groups[0]["lr"] == torch.tensor(0.1)
    for parameter, mine in zip(model.parameters(), other.parameters()):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(new.state[mine][key], value)


def test_retention(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=False, keep=2, keep_every=10, best=("accuracy", "max")) as checkpoints:
        for step, accuracy in enumerate([0.1, 0.9, 0.3, float("nan"), 0.5] * 3):
            checkpoints.save(step, accuracy=accuracy)
        assert checkpoints.steps() == [0, 10, 11, 13, 14]
    with pytest.raises(ValueError, match="keep is 1"):
        Checkpointer(tmp_path, keep=1)
    assert (tmp_path / "latest").read_text() == "step-14\n"


def test_the_manifest_and_its_schema(tmp_path: Path) -> None:
    import jsonschema

    import vescale.checkpoint

    save(tmp_path / "one", model=model_of(), note=2)
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    schema = json.loads((Path(vescale.checkpoint.__file__).parent / "manifest.schema.json").read_text())
    jsonschema.validate(manifest, schema)
    assert manifest["version"] == schema["properties"]["version"]["const"] == 1
    for broken in ({"version": 2}, {"files": [{"name": "x"}]}, {"tensors": {"a": {}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest | broken, schema)
    data = (tmp_path / "one" / "data-00000.bin").read_bytes()
    entry = manifest["tensors"]["model.0.weight"]
    (_, sizes, _, start, _) = entry["boxes"][0]
    found = torch.frombuffer(bytearray(data[start : start + 4 * 35]), dtype=torch.float32).view(sizes)
    assert start % 64 == 0 and torch.equal(found, model_of()[0].weight)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unusual_tensors(tmp_path: Path, asynchronous: bool) -> None:
    """Values that are not in memory, dtypes without a kernel for copies, strides; and what cannot be saved or filled."""
    numbers = torch.randn(6, dtype=torch.complex64)
    saved = {
        "conjugate": numbers.conj(),
        "negative": torch._neg_view(numbers.real.clone()),
        "imaginary": numbers.conj().imag,
        "bits": torch.arange(6, dtype=torch.uint8).view(torch.uint4),
        "scales": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "expanded": torch.arange(3.0).expand(4, 3),
        "columns": torch.arange(12.0).view(3, 4).t()[::2],
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(True),
    }
    with Checkpointer(tmp_path / "run", asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, **saved)
        found = checkpoints.restore()
        assert found is not None
        for name, value in saved.items():
            if name in ("bits", "scales"):
                found[name], value = found[name].view(torch.uint8), value.view(torch.uint8)
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        with pytest.raises(CheckpointError, match=r"model.bias: a lazy module has not created this tensor yet"):
            checkpoints.save(2, model=nn.LazyLinear(3))
    model = nn.Module()
    model.register_buffer("table", torch.arange(12.0).view(4, 3))
    save(tmp_path / "one", model=model)
    model.register_buffer("table", torch.zeros(3).expand(4, 3))
    with pytest.raises(CheckpointError, match=r"model.table: several elements .* clone\(\)"):
        load(tmp_path / "one", model=model)
