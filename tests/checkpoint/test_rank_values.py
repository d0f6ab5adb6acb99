"""What ranks have different values of is saved for each rank, or named; it is not replaced by the first rank's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

import vescale.checkpoint
from tests.device import device_type
from tests.ranks import RankPools
from vescale.checkpoint import Checkpointer, CheckpointError, CheckpointWarning, load, save, verify
from vescale.checkpoint._rank_file import differing, digests_of
from vescale.checkpoint._step_folder import merge_parts
from vescale.errors import ContentMismatchError, ManifestError


class Counter(nn.Module):
    """With a state that is not a tensor."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Loader:
    """As torchdata's, whose state is that of its rank."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "queue": torch.tensor([7])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def on_ranks(folder: str, asynchronous: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with Checkpointer(folder, asynchronous=asynchronous, keep=None) as checkpoints:
        more = {"mine": rank} if rank == 1 else {}
        checkpoints.save(1, model=Counter(5), loader=Loader(3), same=[1.5])
        checkpoints.save(2, model=Counter(rank), loader=Loader(10 * rank), same=[1.5], **more)
        checkpoints.wait()
        for step, position, count in ((1, 3, 5), (2, 10 * rank, rank)):
            model, loader = Counter(-1), Loader(-1)
            found = checkpoints.restore(model=model, step=step, loader=loader)
            assert found is not None and found["same"] == [1.5]
            assert (loader.position, model.count) == (position, count)
            assert found.get("mine") == (1 if step == 2 and rank == 1 else None)
    manifest = json.loads(Path(folder, "step-2", "manifest.json").read_text())
    ranks = manifest["values"]["ranks"]
    assert {kind: sorted(held) for kind, held in ranks.items()} == {
        "beside": ["loader", "mine"],
        "extra": ["_extra_state"],
    }
    assert list(ranks["beside"]["mine"]) == ["1"] and len(ranks["beside"]["loader"]) == world
    schema = Path(vescale.checkpoint.__file__).with_name("manifest.schema.json")
    jsonschema.validate(manifest, json.loads(schema.read_text()))
    assert "ranks" not in json.loads(Path(folder, "step-1", "manifest.json").read_text())["values"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_rank_gets_its_own(ranks: RankPools, tmp_path: Path, asynchronous: bool) -> None:
    folder = str(tmp_path / "run")
    ranks.run(on_ranks, folder, asynchronous, world_size=2)
    model, loader = Counter(-1), Loader(-1)
    with pytest.warns(
        CheckpointWarning, match=r"by 2 ranks with different values of .*loader, mine, and there are 1 now"
    ):
        found = Checkpointer(folder).restore(model=model, loader=loader, rng=False)
    assert found is not None and (loader.position, model.count, found["mine"]) == (0, 0, 1)
    assert not verify(folder)


def options_differ(folder: str) -> None:
    model = nn.Linear(2, 2)
    torch.manual_seed(0)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + dist.get_rank())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save(folder, model=model, optimizer=optimizer)
    texts = [str(each.message) for each in told if issubclass(each.category, CheckpointWarning)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all("optimizer: options, or states that are not tensors, differ between ranks" in text for text in texts)


def replicas_differ(folder: str) -> None:
    """Of a tensor that comes after the first save, which all ranks write."""
    mesh = init_device_mesh(device_type(), (2,))
    model = Counter(0)
    with Checkpointer(folder, asynchronous=False) as checkpoints:
        checkpoints.save(0, model=model)
        late = DTensor.from_local(torch.full((8,), float(dist.get_rank())), mesh, [Replicate()], run_check=False)
        with pytest.raises(CheckpointError, match=r"late: rank 1 and an earlier rank have written different values"):
            checkpoints.save(1, model=model, late=late)


def states_elsewhere(folder: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ContentMismatchError, match=r"ZeroRedundancyOptimizer.*as a keyword argument"):
        save(folder, model=model, optimizer=optimizer)


def test_ranks_that_should_be_equal(ranks: RankPools, tmp_path: Path) -> None:
    for case in (options_differ, replicas_differ, states_elsewhere):
        ranks.run(case, str(tmp_path / case.__name__), world_size=2)


def test_stages_of_a_pipeline_are_not_compared() -> None:
    """Modules that only one rank has."""
    texts = [
        digests_of({"model": {"extra": {name: 1}}, "optimizers": {}, "beside": {}}, optimizers=False) for name in "ab"
    ]
    assert differing(texts) == {}
    texts[1] = digests_of({"model": {"extra": {"a": 2}}, "optimizers": {}, "beside": {"x": None}}, optimizers=False)
    assert differing(texts) == {"beside": ["x"], "extra": ["a"]}


def test_buffers_may_differ() -> None:
    part = {"samples": {}, "is_new": False}
    parts = [
        part
        | {
            "file": {"name": f"data-{rank}", "bytes": 4, "crc32": rank},
            "tensors": {"model.mean": [[1], "float32", [[[0], [1], 0, rank]]]},
            "buffers": ["model.mean"],
        }
        for rank in range(2)
    ]
    head = {"values": {"model": None, "optimizers": {}, "beside": {}}}
    manifest, _ = merge_parts(head, parts)
    assert manifest["files"][1]["copies"] == [["model.mean", [1], 0, "00000001"]]
    with pytest.raises(ManifestError, match="different values of the same elements"):
        merge_parts(head, [each | {"buffers": []} for each in parts])


class Counting(torch.optim.SGD):
    """Keeps a number, and an average, outside of ``state``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls, self.average = 0, torch.zeros(2, dtype=torch.float64)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.average += self.calls
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.calls, self.average = own.pop("calls"), own.pop("average")
        super().load_state_dict(own)


def test_optimizers_with_a_state_dict_of_their_own(tmp_path: Path) -> None:
    """What it has beside states and groups comes back through its ``load_state_dict``; states keep their bits."""
    model = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = Counting(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.randn(state["momentum_buffer"].shape)  # not of the parameter's dtype
    optimizer.param_groups[0]["lr"] = 0.25
    save(tmp_path / "a", model=model, optimizer=optimizer)
    other = nn.Linear(3, 3).to(torch.bfloat16)
    again = Counting(other.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(again)
    groups = again.param_groups[0]
    load(tmp_path / "a", model=other, optimizer=again)
    assert again.calls == 2 and again.average.tolist() == [3.0, 3.0]
    assert again.param_groups[0] is groups and groups["lr"] == 0.25 and scheduler.optimizer is again
    for mine, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(again.state[mine]["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"])


class FormatOfBytes(nn.Linear):
    """Its extra state is a tensor, made anew for each state dict, of a size that changes, as in modules of fp8."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.history = torch.zeros(0)

    def get_extra_state(self) -> Any:
        return self.history.clone()

    def set_extra_state(self, state: Any) -> None:
        self.history = state.clone()


class FormatInDict(FormatOfBytes):
    def get_extra_state(self) -> Any:
        return {"history": self.history.clone(), "margin": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state["margin"] == 1
        self.history = state["history"].clone()


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("kind", [FormatOfBytes, FormatInDict])
def test_extra_state_that_is_a_tensor(tmp_path: Path, kind: type[FormatOfBytes], size: int) -> None:
    """One that is filled in place, where it is, would be lost."""
    model, other = (nn.ModuleDict({"extra": kind(), "b": kind()}) for _ in range(2))
    for number, (name, module) in enumerate(model.items()):
        module.history, other[name].history = torch.arange(4.0) + number, torch.zeros(size)
    save(tmp_path / "one", model=model)
    load(tmp_path / "one", model=other)
    for name, module in model.items():
        assert torch.equal(other[name].history, module.history) and torch.equal(other[name].weight, module.weight)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    again = nn.ModuleDict({"extra": kind(), "b": kind()})
    load(tmp_path / "x.pt", model=again)
    assert torch.equal(again["b"].history, model["b"].history)
