"""Any mesh to any mesh: full tensors and the steps after a restore have the bits of one device, for every optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.device import device_type
from tests.optim import test_adamw8bit_ranks as dense
from tests.optim.test_adamw8bit_ranks import set_gradients
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import parallelize
from vescale.checkpoint import Checkpointer
from vescale.optim import EMA, SOAP, AdamW8bit, Muon, Shampoo, muon_groups
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

OPTIMIZERS = ("adamw", "sgd", "adamw8bit", "muon", "soap", "shampoo")
EMBEDDINGS = [r"embed\.weight"]


class Net(dense.Net):
    """Tied, frozen and unused parameters, one without a dim, and four experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 32, 96))


def model_of() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(kind: str) -> Any:
    """``plan``: units of a plan. ``ep``: whole experts over one axis, everything sharded at rest over both."""
    model, world = model_of(), dist.get_world_size()
    if kind != "ep":
        return dense.sharded(kind, model)
    plan = Plan(init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("fsdp", "ep")))
    plan.shard("experts", Shard(0), mesh="ep")
    for path, axes in (("experts", ["fsdp"]), ("(?!experts).*", ["fsdp", "ep"])):
        for axis in axes:
            plan.shard(path, RaggedShard(block=256), mesh=axis, phase=INIT)
            plan.shard(path, Replicate(), mesh=axis, phase=RUN)
    parallelize(model, plan)
    return model


def optimizer_of(kind: str, model: nn.Module) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "sgd":
        return torch.optim.SGD([{"params": list(model.parameters()), "lr": 0.1}], momentum=0.9)
    if kind == "adamw8bit":
        return AdamW8bit(model.named_parameters(), lr=1e-2)
    made = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}[kind]
    options = {} if kind == "muon" else {"precondition_frequency": 2, "max_preconditioner_dim": 128}
    groups = muon_groups(model, adamw=EMBEDDINGS, verbose=False)
    for group in groups:
        group["algorithm"] = "adamw" if group["algorithm"] == "adamw" else kind
    return made(groups, lr=1e-2, **options)


def train(model: nn.Module, optimizer: Any, ema: EMA, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        ema.update()


def everything(model: nn.Module, optimizer: Any, ema: EMA) -> dict[str, torch.Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    found |= {f"average {name}": value for name, value in ema.state_dict()["averages"].items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value
    return {name: value.clone() for name, value in whole_tensors(found).items() if value is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), f"{what}: {name}"


def save(cases: list[tuple[str, str, str]]) -> None:
    for kind, optimizer_kind, folder in cases:
        model = sharded(kind)
        optimizer, ema = optimizer_of(optimizer_kind, model), EMA(model, 0.9)
        with Checkpointer(folder, asynchronous=optimizer_kind in ("adamw", "soap")) as checkpoints:
            checkpoints.save(0, model=model, optimizer=optimizer, ema=ema)  # before states that the first step makes
            train(model, optimizer, ema, range(3))
            checkpoints.save(3, model=model, optimizer=optimizer, ema=ema)


def load(cases: list[tuple[str, str, str]]) -> None:
    for kind, optimizer_kind, folder in cases:
        one = model_of()
        expected, averages = optimizer_of(optimizer_kind, one), EMA(one, 0.9)
        train(one, expected, averages, range(3))
        model = sharded(kind)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer, ema = optimizer_of(optimizer_kind, model), EMA(model, 0.9)
        result = Checkpointer(folder).restore(model=model, optimizer=optimizer, ema=ema)
        assert result is not None and result["step"] == 3 and result["ema"]["num_updates"] == 3
        what = f"{folder} to {kind}"
        assert_same(everything(model, optimizer, ema), everything(one, expected, averages), what)
        for module, each, average in ((one, expected, averages), (model, optimizer, ema)):
            train(module, each, average, range(3, 5))
        assert_same(everything(model, optimizer, ema), everything(one, expected, averages), f"{what}, next steps")


SOURCES = [("fsdp", 4), ("hsdp", 4), ("tp", 4), ("plan", 4), ("ep", 4)]
TARGETS = [("fsdp", 3), ("plan", 2), ("hsdp", 4), ("ep", 2), ("plain", 1)]


@pytest.mark.parametrize(
    ("optimizer", "source", "target"), [("adamw", "hsdp", "plan"), ("muon", "ep", "plan"), ("adamw8bit", "fsdp", "ep")]
)
def test_from_four_ranks_to_two(ranks: RankPools, tmp_path: Path, optimizer: str, source: str, target: str) -> None:
    ranks.run(save, [(source, optimizer, str(tmp_path))], world_size=4)
    ranks.run(load, [(target, optimizer, str(tmp_path))], world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_pair_of_meshes(ranks: RankPools, tmp_path: Path, optimizer: str) -> None:
    for kind, world in SOURCES:
        ranks.run(save, [(kind, optimizer, str(tmp_path / kind))], world_size=world)
    for kind, world in TARGETS:
        ranks.run(load, [(kind, optimizer, str(tmp_path / source)) for source, _ in SOURCES], world_size=world)
