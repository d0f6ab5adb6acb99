"""Who reads and writes what: each byte once a replica group, no collectives in a save, and errors alike on all ranks."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.ranks import RankPools
from vescale.agreement import Round
from vescale.agreement import _round as agreement_round
from vescale.agreement import _round as agreement_store
from vescale.checkpoint import (
    Checkpointer,
    CheckpointError,
    Stored,
    StoredBox,
    StoredTensor,
    load,
    read_tensors,
    save,
    verify,
)
from vescale.checkpoint import _reader as reader
from vescale.checkpoint import _replicas as gathering
from vescale.errors import ConsensusError, ContentMismatchError, LateRanksWarning, NoSuchStepError, UnsavableError
from vescale.fsdp import fully_shard
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, normalize_placements

pytestmark = pytest.mark.waits

SHAPE = (48, 40)


def whole(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def placed(placements: Any, seed: int = 0, zero: bool = False) -> DTensor:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    values = torch.zeros(SHAPE) if zero else whole(seed)
    return distribute_tensor(values, mesh, normalize_placements(placements, SHAPE, mesh), src_data_rank=None)


PLACEMENTS = {
    "replicated": (Replicate(), Replicate()),
    "hsdp": (Replicate(), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "both": (Shard(0), Shard(1)),
    "ragged": (Replicate(), RaggedShard((0, 1), (13, 47))),
    "interleaved": (InterleavedShard(0, 3), Replicate()),
}


class Reads:
    """Bytes that this process reads from data files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        original = os.preadv

        def preadv(descriptor: int, buffers: Any, offset: int) -> int:
            count = original(descriptor, buffers, offset)
            self.bytes += count
            return count

        monkeypatch.setattr(reader.os, "preadv", preadv)


def share(folder: str) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = {name: placed(placements, number) for number, (name, placements) in enumerate(PLACEMENTS.items())}
        plain = {"plain": whole(9), "count": torch.tensor(3)}
        save(folder, tensors=own, plain=plain)
        manifest = json.loads((Path(folder) / "manifest.json").read_text())
        files = sum(file["bytes"] for file in manifest["files"])
        reads = Reads(monkeypatch)
        empty = {f"tensors.{name}": placed(placements, zero=True) for name, placements in PLACEMENTS.items()}
        empty |= {"plain.plain": torch.zeros(SHAPE), "plain.count": torch.tensor(0)}
        from vescale.checkpoint import open_stored

        read_tensors(open_stored(folder), empty)
        for number, name in enumerate(PLACEMENTS):
            assert torch.equal(empty[f"tensors.{name}"].full_tensor(), whole(number)), name  # type: ignore[attr-defined]
        assert torch.equal(empty["plain.plain"], whole(9)) and empty["plain.count"] == 3
        return reads.bytes, files


def test_bytes_are_written_and_read_once(ranks: RankPools, tmp_path: Path) -> None:
    answers = ranks.run(share, str(tmp_path / "one"), world_size=4)
    needed = (len(PLACEMENTS) + 1) * math.prod(SHAPE) * 4 + 8
    assert sum(count for count, _ in answers) <= 1.05 * needed
    written = answers[0][1]
    assert needed <= written <= needed + 4 * 20000  # and random states of the ranks
    balance = [count for count, _ in answers]
    assert max(balance) <= 1.8 * sum(balance) / 4


def steady(folder: str, asynchronous: bool) -> None:
    """The second save of a sharded model: no collective on any group, no connection to the store, and one message of each
    rank through it."""
    mesh = init_device_mesh(device_type(), (2,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

    def num_collectives() -> list[int]:
        assert dist.group.WORLD is not None
        if device_type() != "cpu":  # a group with a backend for each device has no number of its own
            launches = torch.get_device_module().counts()["launches"]["ops"]
            return [count for name, count in launches.items() if "::" not in name and "copy" not in name]
        return [group._get_sequence_number_for_group() for group in (dist.group.WORLD, mesh.get_group())]

    rounds: list[str] = []
    original = gathering.Gathering.round

    def count(self: Any, *args: Any) -> Any:
        rounds.append("round")
        return original(self, *args)

    with Checkpointer(folder, asynchronous=asynchronous) as checkpoints, pytest.MonkeyPatch.context() as patch:
        checkpoints.save(1, model=model, optimizer=optimizer, note="x")
        checkpoints.wait()
        before = num_collectives()
        patch.setattr(gathering.Gathering, "round", count)
        patch.setattr(agreement_store, "own_connection", lambda: rounds.append("connection"))
        patch.setattr(Round, "exchange", lambda *args: rounds.append("exchange"))
        checkpoints.save(2, model=model, optimizer=optimizer, note="x")
        checkpoints.wait()
        assert rounds == ["round"]
        assert num_collectives() == before
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
        assert num_collectives() != before, "the counters of the groups do not count"
        assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_collective(ranks: RankPools, tmp_path: Path, asynchronous: bool) -> None:
    ranks.run(steady, str(tmp_path), asynchronous, world_size=2)


def own_experts(folder: str) -> None:
    """Plain parameters of one name that are other parameters on each rank: one of them would be lost."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(300, 3)
    with pytest.raises(CheckpointError, match=r"different values on several ranks: model.bias \(ranks 0 and 1\)"):
        save(folder, model=model)
    with pytest.raises(CheckpointError, match=r"is float32\[3\] on rank 0|different values"):
        save(folder, model=nn.Linear(3, 3 + dist.get_rank()))


def stages(folder: str) -> None:
    """Each rank has modules and an optimizer of its own, as pipeline stages; loaded in another division."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    both = nn.ModuleDict({"first": nn.Linear(4, 5), "second": nn.Linear(5, 6)})
    mine = nn.ModuleDict({name: both[name] for name in (["first"], ["second"])[rank]})
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    for p in mine.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, model=mine, optimizer=optimizer)
        checkpoints.save(2, model=mine, optimizer=optimizer)
    again = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in (("first", (4, 5)), ("second", (5, 6)))})
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    load(Path(folder) / "step-2", model=again, optimizer=other)
    name = ("first", "second")[rank]
    for own, expected in zip(again[name].parameters(), mine[name].parameters()):
        assert torch.equal(own, expected)
        assert torch.equal(other.state[own]["momentum_buffer"], optimizer.state[expected]["momentum_buffer"])
    assert float(other.state[again["second"].bias]["momentum_buffer"][0]) == 2.0


def failing_rank(folder: str) -> None:
    """One rank cannot write, or has another model: all raise, and nothing is changed."""
    from vescale.checkpoint import _disk

    model = nn.Linear(4, 4)
    torch.manual_seed(0)
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        checkpoints.save(1, model=model)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if dist.get_rank() == 1:
                monkeypatch.setattr(_disk, "sync", lambda descriptor: (_ for _ in ()).throw(OSError(5, "no disk")))
            with pytest.raises(
                CheckpointError, match=r"step-2 was not saved; earlier steps are unchanged: .*rank 1: .*no disk"
            ):
                checkpoints.save(2, model=model)
        with pytest.raises(CheckpointError, match="ranks save different steps"):
            checkpoints.save(5 + dist.get_rank(), model=model)
        checkpoints.save(3, model=model)
        assert checkpoints.steps() == [1, 3]
        other = nn.Linear(4, 4 + dist.get_rank())
        before = other.weight.clone()
        with pytest.raises(ContentMismatchError, match=r"(?s)rank 1: .*expected shape \(5, 4\)"):
            checkpoints.restore(model=other)
        assert torch.equal(other.weight, before)
        with pytest.raises(NoSuchStepError, match=r"no step 2; it has \[1, 3\]"):
            checkpoints.restore(model=model, step=2)
        optimizer = torch.optim.SGD(model.parameters()) if dist.get_rank() == 0 else None
        with pytest.raises(CheckpointError, match="rank 0 saves an optimizer, and rank 1 saves none"):
            checkpoints.save(4, model=model, optimizer=optimizer)


def unsavable_on_a_rank(folder: str) -> None:
    """What one rank cannot save: it raises, and the others hear of it; nobody waits for a file that does not come."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def value(bad: int) -> Any:
        return object() if rank == bad else 1

    for bad in (0, 1):
        with pytest.raises(CheckpointError, match=r"value is a builtins.object"):
            save(f"{folder}/one", model=model, value=value(bad))
        assert not Path(folder, "one").exists()
        for asynchronous in (False, True):
            with Checkpointer(f"{folder}/{bad}-{asynchronous}", asynchronous=asynchronous) as checkpoints:
                for step in (1, 3):
                    own = pytest.raises(UnsavableError, match=r"value is a builtins\.object")
                    told = pytest.raises(
                        CheckpointError, match=rf"was(?:| not) saved.*rank {bad}: value is a builtins.object"
                    )
                    with own if rank == bad else told, warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        checkpoints.save(step, model=model, value=value(bad))
                        checkpoints.wait()
                    checkpoints.save(step + 1, model=model, value=1)
                checkpoints.wait()
                dist.barrier()
                assert checkpoints.steps() == [2, 4]
                assert not [name for name in os.listdir(checkpoints.folder) if "tmp" in name]


def only_some_ranks(folder: str) -> None:
    """``if rank == 0: save(...)``: the rank names those that have not come, says what to do, and gives up in time."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    checkpoints = Checkpointer(f"{folder}/steps", asynchronous=False)
    behind = Checkpointer(f"{folder}/behind", asynchronous=True)
    for each in (checkpoints, behind):
        each.save(1, model=model)
        each.wait()

    def save_behind() -> None:
        behind.save(2, model=model)
        behind.wait()

    calls = {
        "save": lambda: save(f"{folder}/one", model=model),
        "load": lambda: load(f"{folder}/steps", model=model),
        "Checkpointer.restore": lambda: checkpoints.restore(model=model),
        "Checkpointer.save": lambda: checkpoints.save(2, model=model),
        "Checkpointer.save ": save_behind,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement_round, "_PATIENCE", timedelta(seconds=0.2))
        patch.setenv("VESCALE_TIMEOUT", "1")
        for number, (call, run) in enumerate(calls.items()):
            if number >= 3:  # the time limit is that of the first save
                for each in (checkpoints, behind):
                    each._saver._gathering.rounds.timeout = timedelta(seconds=1)
            caller = number % 2
            if rank == caller:
                said = rf"ranks \[{1 - caller}\] did not reach {call.strip()} "
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    with pytest.raises(CheckpointError, match=said + r"within 0:00:01.*every rank must call it"):
                        run()
                texts = [str(one.message) for one in told if issubclass(one.category, LateRanksWarning)]
                assert len(texts) == 1 and re.match(said + r"for 0 s.*if rank == 0", texts[0]), (call, texts, told)
            dist.barrier()
            if rank != caller:  # comes too late
                with (
                    warnings.catch_warnings(),
                    pytest.raises(CheckpointError, match=f"did not reach {call.strip()} "),
                ):
                    warnings.simplefilter("ignore")
                    run()
            dist.barrier()
    for each in (checkpoints, behind):
        each.save(3, model=model)
        each.wait()
        dist.barrier()
        assert each.steps() == [1, 3]
        each.close()


def later_or_on_other_meshes(folder: str) -> None:
    """A tensor of which each rank has a mesh of its own, as a layer that two stages share, and states that come after the
    first save, are written once; what else comes later is written by all, and is no damage."""
    rank = dist.get_rank()
    alone = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("a", "b"))["b"]
    model = nn.Linear(256, 128)
    for name in ("weight", "bias"):
        value = torch.randn(getattr(model, name).shape, generator=torch.Generator().manual_seed(1))
        setattr(model, name, nn.Parameter(distribute_tensor(value, alone, [Replicate()], src_data_rank=None)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        checkpoints.save(0, model=model, optimizer=optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        checkpoints.save(1, model=model, optimizer=optimizer, late=torch.arange(512.0))
    if rank == 0:
        sizes = [sum(path.stat().st_size for path in Path(folder, f"step-{step}").glob("data-*")) for step in (0, 1)]
        parameters = sum(p.numel() * 4 for p in model.parameters())
        assert parameters <= sizes[0] <= 1.4 * parameters  # and random states
        assert sizes[1] - sizes[0] <= 2 * parameters + 2 * 4 * 512 + 500
        step = Path(folder, "step-1")
        files = json.loads((step / "manifest.json").read_text())["files"]
        (copy,) = [(file["name"], *one) for file in files for one in file.get("copies", ())]
        assert copy[1] == "late" and copy[2] == [512]
        assert verify(folder) == []
        data = bytearray((step / copy[0]).read_bytes())
        data[copy[3]] ^= 1
        (step / copy[0]).write_bytes(data)
        assert any("another copy of" in line for line in verify(folder))
    dist.barrier()


def in_different_calls(folder: str) -> None:
    """Ranks that come by different calls, and ranks that wait for each other in different places, learn of it at once."""
    rank = dist.get_rank()
    model = nn.Linear(4, 4)
    checkpoints = Checkpointer(folder)
    with pytest.raises(
        CheckpointError, match=r"rank 0 in Checkpointer.save, rank 1 in Checkpointer.restore; every rank"
    ):
        if rank == 0:
            checkpoints.save(1, model=model)
        else:
            checkpoints.restore(model=model)
    comparison = Round(range(2), "a test")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(agreement_round, "_PATIENCE", timedelta(seconds=0.2))
        if rank == 0:
            with pytest.raises(
                CheckpointError, match=r"because ranks wait for each other: rank 0 is at 'load'.*parallelize"
            ):
                load(folder, model=model)
        else:
            with pytest.raises(ConsensusError, match=r"rank 0 is at 'load'.*rank 1 is at 'parallelize'"):
                comparison.exchange(b"", lambda: "parallelize")
    dist.barrier()
    if rank == 1:  # a rank that comes later learns of it, and is in step again
        with pytest.raises(CheckpointError, match=r"ranks \[1\] did not reach load"):
            load(folder, model=model)


def run_all(folder: str) -> None:
    cases = (
        own_experts,
        stages,
        failing_rank,
        unsavable_on_a_rank,
        only_some_ranks,
        later_or_on_other_meshes,
        in_different_calls,
    )
    for number, case in enumerate(cases):
        case(f"{folder}/{number}")


def test_ranks_that_differ(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(run_all, str(tmp_path), world_size=2)


def test_amplification_of_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of a large mesh reads what it holds, and less than a page around each run."""
    rows, columns = 64, 8192
    values = torch.arange(rows * columns, dtype=torch.float32)
    (tmp_path / "data").write_bytes(values.numpy().tobytes())
    box = StoredBox((0, 0), (rows, columns), "data", 0)
    stored = Stored(tmp_path, {"x": StoredTensor((rows, columns), torch.float32, (box,))}, "vescale")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=16)
    try:
        mesh = init_device_mesh(device_type(), (4, 4), mesh_dim_names=("a", "b"))
        for placements in (
            (Shard(0), Shard(1)),
            (Shard(1), Replicate()),
            (Replicate(), RaggedShard((0, 1), (1, 2, 3, 2))),
        ):
            placements = normalize_placements(placements, (rows, columns), mesh)
            target = distribute_tensor(torch.zeros(rows, columns), mesh, placements, src_data_rank=None)
            expected = distribute_tensor(values.view(rows, columns), mesh, placements, src_data_rank=None)
            with monkeypatch.context() as patch:
                reads = Reads(patch)
                read_tensors(stored, {"x": target})
            assert torch.equal(target.to_local(), expected.to_local())
            assert reads.bytes <= 1.05 * target.to_local().nbytes
    finally:
        dist.destroy_process_group()
