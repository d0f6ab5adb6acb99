"""Saves from several threads, of several Checkpointers, and beside errors of one rank: each step holds one state, and nobody
waits for a rank that has failed."""

from __future__ import annotations

import itertools
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.examples import daily_sample
from tests.ranks import RankPools
from vescale.checkpoint import Checkpointer, CheckpointError, _checkpointer, _saving, verify
from vescale.errors import OptimizerError, SaveFailedError, UnsavableError
from vescale.optim import EMA

pytestmark = pytest.mark.filterwarnings("ignore:.*which are newer than:vescale.errors.CheckpointWarning")


def state(value: int) -> dict[str, Any]:
    """Many tensors, so that copies of several saves have the time to mix."""
    return {f"t{i}": torch.full((64, 1 + 97 * i), float(value)) for i in range(12)} | {"plain": value}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_threads(tmp_path: Path, asynchronous: bool) -> None:
    errors: list[BaseException] = []
    with Checkpointer(tmp_path, keep=None, asynchronous=asynchronous) as checkpoints:

        def run(thread: int) -> None:
            try:
                for step in range(thread, 24, 3):
                    checkpoints.save(step, **state(step))
                    if random.random() < 0.3:
                        checkpoints.wait()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        checkpoints.wait()
        assert not errors and checkpoints.steps() == list(range(24))
        for step in range(24):
            found = checkpoints.restore(step=step)
            assert found is not None and found["plain"] == step
            assert all(bool((found[f"t{i}"] == step).all()) for i in range(12)), step
    assert verify(tmp_path) == []


def test_a_save_inside_of_a_save(tmp_path: Path) -> None:
    """Of a signal handler, or of a ``state_dict()``: an error, and the next save is sound."""

    class Saving:
        def state_dict(self) -> dict[str, Any]:
            checkpoints.save(2, value=2)
            return {}

    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(SaveFailedError, match=r"save was called during another call.*set a flag"):
            checkpoints.save(1, value=Saving())
        checkpoints.save(3, value=3)
        assert checkpoints.restore() == {"step": 3, "value": 3}


def test_two_on_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins, fails, and begins anew while a save of the first one is unfinished."""
    written, goes_on = threading.Event(), threading.Event()
    first, second = (Checkpointer(tmp_path, keep=None, asynchronous=False) for _ in range(2))
    original = _saving.commit

    def slow(job: Any) -> dict[str, Any]:
        if job["name"] == "step-1":
            written.set()
            assert goes_on.wait(20)
        return original(job)

    monkeypatch.setattr(_saving, "commit", slow)
    thread = threading.Thread(target=first.save, args=(1,), kwargs=state(1))
    thread.start()
    assert written.wait(20)
    (leftover,) = tmp_path.glob("step-1.tmp-*")
    second.save(2, **state(2))
    with pytest.raises(CheckpointError, match="step-2 already exists"):
        second.save(2, **state(2))
    second.save(3, **state(3))
    assert leftover.exists()
    goes_on.set()
    thread.join()
    assert first.steps() == [1, 2, 3] and verify(tmp_path) == []
    abandoned = tmp_path / "step-9.tmp-0123456789abcdef"  # of a job that is gone
    abandoned.mkdir()
    for each in (first, second):
        each.close()
    with Checkpointer(tmp_path, keep=None, asynchronous=False) as third:
        third.save(4, **state(4))
    assert not list(tmp_path.glob("*.tmp-*"))


# Where a save calls a function between its snapshot and its end, on which ranks; "writer": in asynchronous saves only.
POINTS = {
    "take_snapshot": (0, 1),
    "owned": (0, 1),
    "layout_of": (0, 1),
    "samples": (0, 1),
    "_head": (0,),
    "RankFile": (0, 1),
    "fill_image": (0, 1),
    "_check_space": (0, 1),
    "digests_of": (0, 1),
    "pack_part": (0, 1),
    "pick": (0, 1),
    "differing": (0,),
    "add_values_of_ranks": (0,),
    "commit": (0,),
    "asdict": (0,),
}
ERRORS = (MemoryError, KeyError, RuntimeError, AssertionError, UnicodeDecodeError, OSError, KeyboardInterrupt)


def draws(seed: int) -> list[tuple[str, int, bool, type[BaseException]]]:
    chosen = random.Random(seed)
    points = [(name, rank) for name, those in POINTS.items() for rank in those]
    cases = itertools.product(points, (False, True), ERRORS)
    found = [
        (name, rank, asynchronous, error)
        for (name, rank), asynchronous, error in cases
        if name not in (("fill_image",) if not asynchronous else ("commit",))
        if not (asynchronous and error is KeyboardInterrupt and name in BEHIND)  # a thread does not get one
    ]
    return chosen.sample(found, len(found))


BEHIND = ("_check_space", "digests_of", "pack_part", "pick", "differing", "add_values_of_ranks", "commit", "asdict")


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error("utf-8", b"", 0, 1, "drawn") if error is UnicodeDecodeError else error("drawn")

    return call


def errors_of_a_rank(folder: str, seed: int, count: int) -> None:
    rank = dist.get_rank()
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    for number, (name, bad, asynchronous, error) in enumerate(draws(seed)[:count]):
        case = (name, bad, asynchronous, error)
        with Checkpointer(f"{folder}/{number}", asynchronous=asynchronous) as checkpoints, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if number % 3:  # else the first save fails
                checkpoints.save(1, model=model, own=rank)
                checkpoints.wait()
            begin = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                if rank == bad:
                    place = _checkpointer if name == "take_snapshot" else _saving
                    patch.setattr(place, name, raising(error))
                with pytest.raises((CheckpointError, error) if rank == bad else CheckpointError) as told:
                    checkpoints.save(2, model=model, own=rank)
                    checkpoints.wait()
                if rank != bad:
                    assert "drawn" in str(told.value), (case, told.value)
            assert time.monotonic() - begin < 10, case
            dist.barrier()
            checkpoints.save(3, model=model, own=rank)
            checkpoints.wait()
            dist.barrier()
            assert checkpoints.steps() == ([1, 3] if number % 3 else [3]), case
            found = checkpoints.restore(model=model)
            assert found == {"step": 3, "own": rank}, case


@pytest.mark.parametrize("seed", daily_sample(range(10), 10))
def test_errors_of_a_rank(ranks: RankPools, tmp_path: Path, seed: int) -> None:
    ranks.run(errors_of_a_rank, str(tmp_path), seed, 12, world_size=2)


def test_averages_that_are_swapped_in(tmp_path: Path) -> None:
    """What would save the averages twice, and the trained parameters nowhere, raises; exporting the averages is right."""
    model = nn.Linear(3, 3)
    ema, optimizer = EMA(model, 0.5), torch.optim.SGD(model.parameters())
    nn.init.ones_(model.weight)
    ema.update()
    whole = nn.Sequential(model, nn.Linear(1, 1))
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        unsound: list[dict[str, Any]] = [
            {"ema": ema},
            {"optimizer": optimizer},
            {"model": whole, "optimizer": optimizer},
        ]
        for given in unsound:
            with ema.swap(), pytest.raises((OptimizerError, UnsavableError), match=r"swap"):
                checkpoints.save(1, **{"model": model, **given})
        with ema.swap():
            checkpoints.save(1, model=model)
            averaged = model.weight.clone()
        checkpoints.save(2, model=model, ema=ema, optimizer=optimizer)
        with ema.swap(), pytest.raises(OptimizerError, match="swap"):
            checkpoints.restore(model=model, ema=ema)
        other = nn.Linear(3, 3)
        checkpoints.restore(step=1, model=other)
        assert torch.equal(other.weight, averaged) and not torch.equal(model.weight, averaged)


@pytest.mark.parametrize("seed", daily_sample(range(100), 10))
def test_options_of_groups(tmp_path: Path, seed: int) -> None:
    """Of any groups, some of them without parameters."""
    chosen = random.Random(seed)
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    kind = chosen.choice([torch.optim.SGD, torch.optim.AdamW])

    def made(scale: float) -> torch.optim.Optimizer:
        groups = [
            {"params": list(module.parameters()) if full else [], "lr": scale * (index + 1)}
            for index, (module, full) in enumerate(zip(model, filled))
        ]
        return kind(groups)

    filled = [chosen.random() < 0.5 for _ in range(4)]
    saved = made(0.25)
    saved.param_groups[chosen.randrange(4)]["lr"] = torch.tensor(0.75)
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, model=model, optimizer=saved)
        found = made(1.0)
        checkpoints.restore(model=model, optimizer=found)
        for group, expected in zip(found.param_groups, saved.param_groups):
            assert {**group, "params": 0, "lr": float(group["lr"])} == {
                **expected,
                "params": 0,
                "lr": float(expected["lr"]),
            }
        found.add_param_group({"params": []})
        if all(filled):
            with pytest.raises(CheckpointError, match=r"param_groups\.4.*without parameters"):
                checkpoints.restore(model=model, optimizer=found)
