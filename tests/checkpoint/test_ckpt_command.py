"""``vescale ckpt`` on checkpoints of every format, offline."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jsonschema import validate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.checkpoint.hf_models import reference, same_values, saved
from tests.checkpoint.test_foreign_files import STATE, same, save_dcp, save_safetensors, save_torch, values_of
from tests.plan_zoo.models import MODELS
from vescale.checkpoint import Checkpointer, load, load_hf, open_stored, save
from vescale.cli import main
from vescale.errors import CheckpointError, CheckpointWarning


def command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any, str]:
    """(exit code, JSON or text of the standard output, standard error)."""
    capsys.readouterr()
    code = main(["ckpt", *map(str, args)])
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in args and out else out, err


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(5, 7)
        self.two = nn.Linear(7, 3, dtype=torch.bfloat16)


def trained(folder: Path) -> Net:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(folder, model=model, optimizer=optimizer, extra={"rate": 0.5})
    return model


SAVERS = {"safetensors": save_safetensors, "dcp": save_dcp, "torch": save_torch}


@pytest.mark.parametrize("kind", [*SAVERS, "vescale"])
@pytest.mark.parametrize("to", ["safetensors", "dcp", "vescale"])
def test_convert(kind: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors are equal bit by bit, and what a format cannot hold is told."""
    (tmp_path / "source").mkdir()
    if kind == "vescale":
        trained(tmp_path / "a")
    path = tmp_path / "a" if kind == "vescale" else SAVERS[kind](tmp_path / "source")
    code, found, _ = command(capsys, "convert", path, tmp_path / "b", "--to", to, "--json")
    assert code == 0
    stored = open_stored(tmp_path / "b")
    assert stored.format == to
    before, after = values_of(open_stored(path)), values_of(stored)
    names = {name: name for name in before}
    if to == "safetensors" and kind == "vescale":
        names = {name.removeprefix("model."): name for name in before if name.startswith("model.")}
    if to == "vescale" and kind == "safetensors":
        names = {f"model.{name}": name for name in before}
    assert same(after, {new: before[old] for new, old in names.items()})
    assert found["tensors"] == len(after)  # what was left out is not counted
    assert bool(found["left_out"]) == (to == "safetensors" and kind != "safetensors")
    code, found, _ = command(capsys, "verify", tmp_path / "b", "--json")
    assert (code, found["sound"]) == (0, True)
    code, _, err = command(capsys, "convert", path, tmp_path / "b", "--to", to)
    assert code == 2 and "already exists" in err
    assert sorted(entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name) == []


def test_torch_reads_what_convert_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A DCP folder by PyTorch's own reader, values included, in blocks that are smaller than tensors."""
    from vescale.checkpoint import _convert, _stored_blocks

    save_torch(tmp_path)
    small = pytest.MonkeyPatch()
    with small.context() as patch:
        patch.setattr(_stored_blocks, "BLOCK_BYTES", 16)
        patch.setattr(_convert, "BLOCK_BYTES", 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch's about a missing process group is of no use to a user
            assert command(capsys, "convert", tmp_path / "model.pt", tmp_path / "b", "--to", "dcp")[0] == 0
    assert len(open_stored(tmp_path / "b").tensors["model.a.weight"].boxes) > 1
    target: dict[str, Any] = {f"model.{name}": torch.empty_like(tensor) for name, tensor in STATE.items()}
    dcp.load(target, checkpoint_id=tmp_path / "b", no_dist=True)
    assert same(target, {f"model.{name}": tensor for name, tensor in STATE.items()})
    metadata = dcp.FileSystemReader(tmp_path / "b").read_metadata()
    assert "epoch" in metadata.state_dict_metadata


def test_converted_checkpoints_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model and its optimizer, from vescale's format through DCP and back."""
    model = trained(tmp_path / "a")
    assert command(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "dcp")[0] == 0
    assert command(capsys, "convert", tmp_path / "b", tmp_path / "c", "--to", "vescale")[0] == 0
    for folder in ("b", "c"):
        other = Net()
        optimizer = torch.optim.AdamW(other.parameters())
        load(tmp_path / folder, model=other, optimizer=optimizer)
        assert same(other.state_dict(), model.state_dict())
        assert float(optimizer.state[other.one.weight]["exp_avg"].sum()) != 0


def test_foreign_checkpoints_load(tmp_path: Path) -> None:
    """``load`` finds a model's names behind whatever prefix they have."""
    model = Net()
    expected = dict(model.state_dict())
    (tmp_path / "folder").mkdir()
    torch.save({"state_dict": expected, "epoch": 3}, tmp_path / "x.pt")
    torch.save(expected, tmp_path / "y.pth")
    dcp.save({"app": {"model": expected}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    from safetensors.torch import save_file

    save_file(expected, tmp_path / "z.safetensors")
    for name in ("x.pt", "y.pth", "folder", "z.safetensors"):
        other = Net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load(tmp_path / name, model=other, strict=False)
        assert same(other.state_dict(), expected), name


def test_names_of_wrappers_and_of_unknown_programs(tmp_path: Path) -> None:
    """``torch.compile`` and activation checkpointing rename parameters; a prefix that no list has is told."""
    model = Net()
    expected = dict(model.state_dict())
    wrapped = {
        f"module._orig_mod.{name.replace('one.', 'one._checkpoint_wrapped_module.')}": value
        for name, value in expected.items()
    }
    torch.save(wrapped, tmp_path / "wrapped.pt")
    torch.save({"run": {"net": expected}}, tmp_path / "unknown.pt")
    torch.save({"net": expected, "average": expected}, tmp_path / "two.pt")
    for name, told in (("wrapped", False), ("unknown", True)):
        other = Net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            load(tmp_path / f"{name}.pt", model=other)
        assert [str(one.message) for one in found if "only with the prefix 'run.net.'" in str(one.message)] or not told
        assert same(other.state_dict(), expected), name
    with pytest.raises(CheckpointError, match=r"model.one.weight: not in the checkpoint \(nearest: "):
        load(tmp_path / "two.pt", model=model)


def test_optimizers_of_other_programs_load(tmp_path: Path) -> None:
    """Under the keys of PyTorch's tutorials and examples, by names and by numbers, and in Lightning's files."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    named = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.save({"app": named}, checkpoint_id=tmp_path / "app", no_dist=True)
    dcp.save(named, checkpoint_id=tmp_path / "top", no_dist=True)
    torch.save(named, tmp_path / "named.pt")
    plain, numbered = model.state_dict(), optimizer.state_dict()
    torch.save({"model_state_dict": plain, "optimizer_state_dict": numbered, "epoch": 3}, tmp_path / "tutorial.pt")
    lightning = {f"model.{name}": tensor for name, tensor in plain.items()}
    torch.save({"state_dict": lightning, "optimizer_states": [numbered]}, tmp_path / "lightning.ckpt")
    for name in ("app", "top", "named.pt", "tutorial.pt", "lightning.ckpt"):
        other = Net()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        loaded = torch.optim.AdamW(other.parameters())
        load(tmp_path / name, model=other, optimizer=loaded)
        assert same(other.state_dict(), plain), name
        for ours, theirs in zip(other.parameters(), model.parameters()):
            assert same(loaded.state[ours], optimizer.state[theirs]), name


def test_a_folder_of_transformers_loads(tmp_path: Path) -> None:
    source = saved("mixtral", tmp_path)
    model = MODELS["mixtral"].build()
    assert load(tmp_path, model=model) == {}
    assert same_values(model, source) == []


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = {
        "w": torch.arange(6.0).view(2, 3),
        "b": torch.ones(2),
        "only": torch.ones(1),
        "nan": torch.tensor([float("nan")]),
    }
    b = {"w": a["w"].clone(), "b": torch.ones(3), "new": torch.ones(1), "nan": a["nan"].clone()}
    b["w"][1, 2] += 0.5
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    code, found, _ = command(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert code == 1
    assert found == {
        "equal": False,
        "only_in_a": ["only"],
        "only_in_b": ["new"],
        "forms": {"b": {"a": "float32 (2,)", "b": "float32 (3,)"}},
        "values": {"w": {"elements": 1, "largest": 0.5, "first": [1, 2]}},
        "plain_values": [],
        "equal_tensors": 1,
    }
    code, text, _ = command(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert code == 1 and "~ w: elements that differ: 1, by at most 0.5; the first: (1, 2)" in text
    assert command(capsys, "diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0


def test_diff_of_plain_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is beside equal tensors; the number of a step does not count."""
    model = Net()
    with Checkpointer(tmp_path / "run", asynchronous=False) as checkpoints:
        for step, rate in enumerate([0.1, 0.1, 0.2]):
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            checkpoints.save(step, model=model, optimizer=optimizer, loss=float("nan"), note={"epoch": rate})
    first, second, third = (tmp_path / "run" / f"step-{step}" for step in range(3))
    assert command(capsys, "diff", first, second)[0] == 0
    code, found, _ = command(capsys, "diff", first, third, "--json")
    assert code == 1 and not found["equal"] and found["plain_values"] == ["note", "optimizer.param_groups"]
    code, text, _ = command(capsys, "diff", first, third)
    assert code == 1 and "~ note, which is not a tensor" in text
    assert command(capsys, "diff", first, third, "--no-values")[0] == 0
    for name, rate in (("a.pt", 0.1), ("b.pt", 0.2)):
        torch.save({"w": torch.ones(2), "rate": rate}, tmp_path / name)
    assert command(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 1
    for to in ("dcp", "vescale", "safetensors"):  # a conversion is equal
        assert command(capsys, "convert", third, tmp_path / to, "--to", to)[0] == 0
        expected = 1 if to == "safetensors" else 0
        assert command(capsys, "diff", third, tmp_path / to)[0] == expected


def test_safetensors_of_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "values", average=torch.ones(2))
    code, _, err = command(capsys, "convert", tmp_path / "values", tmp_path / "new", "--to", "safetensors")
    assert code == 2 and "no tensors of a model" in err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", SAVERS)
def test_damage_is_found(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = SAVERS[kind](tmp_path)
    assert command(capsys, "verify", path)[0] == 0
    file = next(tmp_path.glob("*.distcp")) if kind == "dcp" else path
    content = bytearray(file.read_bytes())
    if kind != "safetensors":  # which has no checksums
        position = open_stored(path).tensors["model.a.weight"].boxes[0].start
        content[position + 5] ^= 16
        file.write_bytes(content)
        code, found, _ = command(capsys, "verify", path, "--json")
        assert (code, found["sound"]) == (1, False) and "checksum" in found["problems"][0]
    file.write_bytes(content[:-9])
    code, found, _ = command(capsys, "verify", path, "--json")
    assert code == 1 and found["problems"]


def test_damage_is_not_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is written would have checksums of its own, which are right for wrong values."""
    trained(tmp_path / "a")
    file, box = tmp_path / "a" / "data-00000.bin", open_stored(tmp_path / "a").tensors["model.one.weight"].boxes[0]
    content = bytearray(file.read_bytes())
    content[box.start + 5] ^= 16
    file.write_bytes(content)
    for to in ("safetensors", "dcp", "vescale"):
        code, text, err = command(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", to)
        assert code == 1 and not text and "of model.one.weight, differ from what was written" in err
        assert "nothing was written: take another step" in err and not (tmp_path / "b").exists()
    assert command(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "dcp", "--no-verify")[0] == 0


def test_ls_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vescale.checkpoint import Checkpointer

    model = Net()
    with Checkpointer(tmp_path / "steps", asynchronous=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, model=model, epoch=step, loss=float("nan"))
    (tmp_path / "steps" / "step-2" / "manifest.json").write_text("{")
    code, found, _ = command(capsys, "ls", tmp_path / "steps", "--json")
    assert code == 0
    assert [(row["step"], row["complete"]) for row in found["checkpoints"]] == [(1, True), (2, False)]
    assert command(capsys, "ls", tmp_path / "steps")[1].count("step-") >= 2
    code, found, _ = command(capsys, "show", tmp_path / "steps" / "step-1", "--tensors", "*.weight", "--json")
    assert found["tensors"]["model.one.weight"]["shape"] == [7, 5]
    assert found["values"]["epoch"] == 1 and found["values"]["loss"] == "nan"  # JSON has no NaN
    code, found, _ = command(capsys, "ls", tmp_path / "steps" / "step-2", "--json")
    assert code == 0 and [(row["step"], row["complete"]) for row in found["checkpoints"]] == [(2, False)]
    assert command(capsys, "show", tmp_path / "steps" / "step-2")[0] == 2
    code, found, err = command(capsys, "show", tmp_path / "steps", "--json")
    assert code == 0 and found["path"].endswith("steps") and "step 2 is skipped, because it is not complete" in err
    with pytest.warns(CheckpointWarning, match="step 2 is skipped"):
        assert load(tmp_path / "steps", model=model)["epoch"] == 1
    assert command(capsys, "verify", tmp_path / "steps")[0] == 1
    assert command(capsys, "verify", tmp_path / "steps" / "step-1")[0] == 0
    assert "model.two.weight" in command(capsys, "show", tmp_path / "steps" / "step-1")[1]
    assert "0 of 5 tensors" in command(capsys, "show", tmp_path / "steps" / "step-1", "--tensors", "head*")[1]


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint of training to files of Hugging Face, and from these to a model again."""
    model = saved("mixtral", tmp_path / "hf")
    save(tmp_path / "a", model=model)
    config = f"hf:{tmp_path / 'hf' / 'config.json'}"
    code, out, err = command(capsys, "export", tmp_path / "a", tmp_path / "b", "--model", config, "--json")
    assert code == 0, err
    assert out["bytes"] == sum(p.nbytes for p in model.state_dict().values())
    assert same_values(reference("mixtral", tmp_path / "b"), model) == []
    other = MODELS["mixtral"].build()
    load_hf(other, tmp_path / "b")
    assert same_values(other, model) == []


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "show", tmp_path / "nothing")
    assert code == 2 and "does not exist" in err
    (tmp_path / "text").write_text("hello")
    for action in ("ls", "show", "verify"):
        code, _, err = command(capsys, action, tmp_path / "text")
        assert code == 2 and "not a checkpoint in a known format" in err


def test_documented_schemas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``--json`` prints is what docs/internals/checkpoint-hf.md says."""
    text = (Path(__file__).parents[2] / "docs" / "internals" / "checkpoint-hf.md").read_text()
    schemas = json.loads(text.split("```json\n")[1].split("```")[0])
    path = save_torch(tmp_path)
    runs = {
        "ls": (path,),
        "show": (path,),
        "verify": (path,),
        "diff": (path, path),
        "convert": (path, tmp_path / "b", "--to", "safetensors"),
    }
    for action, args in runs.items():
        validate(command(capsys, action, *args, "--json")[1], schemas[action])
    assert schemas.keys() == {*runs, "export"}
