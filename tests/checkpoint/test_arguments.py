"""What users pass that does not fit: arguments, the same step twice, other optimizers, what was not saved."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vescale.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, load, open_stored, save, verify
from vescale.errors import (
    ArgumentError,
    ContentMismatchError,
    DamagedFileError,
    NoSuchStepError,
    SaveFailedError,
    UnsavableError,
)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 1}, "keep is 1; expected at least 2"),
        ({"keep": "3"}, "keep is '3'"),
        ({"keep": True}, "keep is True"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_every": 2.5}, "keep_every is 2.5"),
        ({"best": 3}, "best is 3; expected a name"),
        ({"best": ("loss", "least")}, "best is"),
        ({"verify": "all"}, "verify is 'all'"),
        ({"asynchronous": "no"}, "asynchronous is 'no'"),
    ],
)
def test_options(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Checkpointer(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_steps(tmp_path: Path) -> None:
    """Numbers of NumPy and torch are numbers; a step that is being written is not replaced by a second one."""
    model, _ = trained()
    with Checkpointer(tmp_path / "run") as checkpoints:
        for wrong in (-1, "5", 1.0, True, None):
            with pytest.raises(ArgumentError, match="step is"):
                checkpoints.save(wrong, model=model)  # type: ignore[arg-type]
        checkpoints.save(np.int64(4), model=model, note="first")  # type: ignore[arg-type]
        checkpoints.save(4, model=model, note="second")
        with pytest.warns(UserWarning, match="already exists"), pytest.raises(CheckpointError, match="already"):
            checkpoints.wait()
        assert checkpoints.restore(model=model, step=torch.tensor(4)) == {"step": 4, "note": "first"}  # type: ignore[arg-type]
        checkpoints.save(4, model=model, note="third")  # scripts that save where they begin
        checkpoints.wait()
        assert checkpoints.restore(model=model) == {"step": 4, "note": "third"}
        checkpoints.save(5, model=model)
        checkpoints.save(4, model=model)
        with pytest.warns(UserWarning, match="already exists"), pytest.raises(CheckpointError, match="already"):
            checkpoints.wait()
        checkpoints.restore(model=model, step=4)
        for unknown in ("newest", 4.0, None, False):
            with pytest.raises(ArgumentError, match='expected "latest"'):
                checkpoints.restore(model=model, step=unknown)  # type: ignore[arg-type]
        with pytest.raises(NoSuchStepError, match=r"no step 6; it has \[4, 5\]"):
            checkpoints.restore(model=model, step=6)
        with pytest.raises(ArgumentError, match="model is an OrderedDict"):
            checkpoints.save(5, model=model.state_dict())  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="model is an OrderedDict"):
            checkpoints.restore(model=model.state_dict())  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="is a file"):
        Checkpointer(tmp_path / "file")


def test_what_was_not_saved(tmp_path: Path) -> None:
    """It is an error by default, before anything is changed, and reported with strict=False."""
    model, _ = trained()
    save(tmp_path / "model", model=model, note=1)
    other, fresh = trained()
    before = {name: p.clone() for name, p in other.state_dict().items()}
    scheduler = torch.optim.lr_scheduler.StepLR(fresh, 3)
    for arguments, message in (
        ({"optimizer": fresh}, "has no optimizer"),
        ({"scheduler": scheduler}, "nothing saved as 'scheduler'"),
        ({"note": 3}, "note is an int without load_state_dict"),
    ):
        with pytest.raises(ContentMismatchError, match=message):
            load(tmp_path / "model", model=other, **arguments)  # type: ignore[arg-type]
    assert all(torch.equal(p, before[name]) for name, p in other.state_dict().items())
    found = load(tmp_path / "model", model=other, optimizer=fresh, scheduler=scheduler, strict=False)
    assert found["not_loaded"]["missing"] == ["optimizer", "scheduler"] and found["note"] == 1
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in other.state_dict().items())


def test_another_kind_of_optimizer(tmp_path: Path) -> None:
    """Its states would be kept beside those of its own, and never be used."""
    model, optimizer = trained()
    save(tmp_path / "one", model=model, optimizer=optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ContentMismatchError, match="the states of AdamW, expected those of SGD"):
        load(tmp_path / "one", model=model, optimizer=sgd)
    assert not sgd.state
    adam = torch.optim.Adam(model.parameters())  # a user who knows that they mean the same
    found = load(tmp_path / "one", model=model, optimizer=adam, strict=False)["not_loaded"]
    assert found == {"missing": [], "surplus": [], "misshapen": {"optimizer": ("the states of AdamW", "those of Adam")}}
    first = next(model.parameters())
    assert torch.equal(adam.state[first]["exp_avg"], optimizer.state[first]["exp_avg"])


def test_keys_that_look_alike(tmp_path: Path) -> None:
    values = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    save(tmp_path / "one", values=values)
    found = load(tmp_path / "one")["values"]
    assert [int(found["a.b"]), int(found["a"]["b"]), int(found[1]), int(found["1"])] == [1, 2, 3, 4]
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UnsavableError, match="circle contains itself"):
        save(tmp_path / "two", circle=circle)


def test_verify_looks_at_all_steps(tmp_path: Path) -> None:
    model, _ = trained()
    with Checkpointer(tmp_path / "run", asynchronous=False) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, model=model)
    assert not verify(tmp_path / "run")
    first, newest = (tmp_path / "run" / name / "data-00000.bin" for name in ("step-1", "step-3"))
    data = bytearray(first.read_bytes())
    data[3] ^= 1
    first.write_bytes(data)
    newest.write_bytes(newest.read_bytes()[:-1])
    found = verify(tmp_path / "run")
    assert len(found) == 2 and "step-1" in found[0] and "step-3" in found[1]
    (tmp_path / "run" / "step-2" / "manifest.json").unlink()
    with pytest.raises(DamagedFileError, match="step-2 is not complete"):
        open_stored(tmp_path / "run" / "step-2")


@pytest.mark.parametrize("names", [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")])
def test_optimizer_of_a_torch_save_file(tmp_path: Path, names: tuple[str, str]) -> None:
    """As tutorials save one: parameters of the optimizer have numbers."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25) if names[0] == "model" else 0.25
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))], "lr": 0.5})
    model.register_parameter("more", optimizer.param_groups[1]["params"][0])
    torch.save({names[0]: model.state_dict(), names[1]: optimizer.state_dict(), "epoch": 3}, tmp_path / "one.pt")
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    other.register_parameter("more", nn.Parameter(torch.ones(5)))
    again = torch.optim.AdamW([{"params": [*other[0].parameters(), *other[1].parameters()]}, {"params": [other.more]}])
    load(tmp_path / "one.pt", model=other, optimizer=again)
    assert float(again.param_groups[0]["lr"]) == 0.25 and again.param_groups[1]["lr"] == 0.5
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours, theirs) and again.state[ours].keys() == optimizer.state[theirs].keys()
        assert all(torch.equal(again.state[ours][key], value) for key, value in optimizer.state[theirs].items())
    for model_of in (optimizer, again):
        for parameter in (p for group in model_of.param_groups for p in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        model_of.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.parameters(), model.parameters()))
    with pytest.raises(
        ContentMismatchError, match=r"groups of \[4, 1\] parameters, without names, but this one has groups of \[5\]"
    ):
        load(tmp_path / "one.pt", model=other, optimizer=torch.optim.AdamW(other.parameters()))
    turned = [{"params": [*other[1].parameters(), *other[0].parameters()]}, {"params": [other.more]}]
    with pytest.raises(ContentMismatchError, match=r"has shape \(8, 4\), and 1.weight"):
        load(tmp_path / "one.pt", model=other, optimizer=torch.optim.AdamW(turned))


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script goes to another folder, as some frameworks make it do, between two saves."""
    model, _ = trained()
    monkeypatch.chdir(tmp_path)
    with Checkpointer("runs/7") as checkpoints:
        checkpoints.save(1, model=model)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        checkpoints.save(2, model=model)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2] and checkpoints.restore(model=model) == {"step": 2}
    assert not any((tmp_path / "other").iterdir())


def test_targets_whose_elements_are_conjugated(tmp_path: Path) -> None:
    """Their memory does not hold the values, so that bytes of a file do not belong there."""

    class Net(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            values = scale * torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
            self.register_buffer("conjugated", values.conj())
            self.register_buffer("negated", values.clone().conj().imag)

    model, other = Net(1.0), Net(0.0)
    assert model.negated.is_neg() and model.conjugated.is_conj()
    save(tmp_path / "one", model=model)
    load(tmp_path / "one", model=other)
    assert torch.equal(model.conjugated, other.conjugated) and torch.equal(model.negated, other.negated)
    assert other.negated.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]


def test_a_step_older_than_those_in_the_folder_stays(tmp_path: Path) -> None:
    """A run that begins anew in the folder of another one: its steps were removed when they had just been saved."""
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step)
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(5)
        with pytest.warns(
            CheckpointWarning, match=r"has steps \[10, 20\], which are newer than step-5: restore.. takes"
        ):
            checkpoints.wait()
        assert checkpoints.steps() == [5, 10, 20] and (tmp_path / "latest").read_text() == "step-5\n"
        assert checkpoints.restore(step=5) == {"step": 5}
        checkpoints.save(6)
        with pytest.warns(CheckpointWarning, match="aside"):
            checkpoints.wait()
        assert checkpoints.steps() == [5, 6]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_branch_whose_first_save_fails(
    tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The save after it still replaces steps of the branch that was left, and puts the later ones aside."""
    with Checkpointer(tmp_path, asynchronous=asynchronous, keep=None) as checkpoints:
        for step in range(5):
            checkpoints.save(step, value=step)
        assert checkpoints.restore(step=2) == {"step": 2, "value": 2}
        with monkeypatch.context() as patch:
            patch.setattr("vescale.checkpoint._saving.shutil.disk_usage", lambda folder: SimpleNamespace(free=-1))
            with pytest.raises(SaveFailedError, match="-1 bytes left"):
                checkpoints.save(3, value=33)
                checkpoints.wait()
        assert checkpoints.steps() == [0, 1, 2, 3, 4]
        checkpoints.save(3, value=33)
        checkpoints.save(4, value=44)
        checkpoints.save(5, value=55)
        checkpoints.wait()
        assert checkpoints.steps() == [0, 1, 2, 3, 4, 5]
        assert [checkpoints.restore(step=step) for step in (3, 4)] == [
            {"step": 3, "value": 33},
            {"step": 4, "value": 44},
        ]


def test_numbers_that_are_not_finite_are_not_the_best(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, best="loss") as checkpoints:
        for step, loss in enumerate([2.0, -math.inf, math.inf, math.nan, np.float32(1.0), torch.tensor(3.0), 4.0]):
            checkpoints.save(step, loss=loss)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5, 6]


@pytest.mark.parametrize("name", ["rng.0", "model.0.weight", "optimizer.state", "step.x"])
def test_names_of_the_checkpoints_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsavableError, match=f"'{name}' is a name that checkpoints use themselves"):
        save(tmp_path / "one", **{name: torch.ones(3)})


def test_a_scheduler_with_milestones(tmp_path: Path) -> None:
    """Its milestones are a Counter, whose methods it calls."""
    _, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
    save(tmp_path / "one", scheduler=scheduler)
    other = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
    load(tmp_path / "one", scheduler=other)
    assert other.milestones == scheduler.milestones and sorted(other.milestones.elements()) == [2, 4, 4]
