"""Gradients are placed like their parameters, so that an optimizer's step communicates nothing: every plan of the zoo, as it
is and with parameters sharded at rest, on meshes with axes of size 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.plan_zoo.models import MODELS, model_of, tokens
from tests.plan_zoo.test_zero import CALLED_ALONE
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from tests.runtime.zero import sharded_at_rest
from vescale import Plan, parallelize, plan_zoo
from vescale.comm import record_comms


@pytest.fixture
def fake_world() -> Iterator[None]:
    """Two ranks of which this is the first: sums and gathers have values of one rank, placements and steps are real."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def plan_of(name: str, sizes: dict[str, int], sharded: bool) -> Plan:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plan = plan_zoo.load(name, mesh)
    if not sharded or name == "llama_zero3":
        return plan
    plan = sharded_at_rest(plan, axis="dp")
    return plan.unit(CALLED_ALONE[name]) if name in CALLED_ALONE else plan


def placed_otherwise(name: str, sizes: dict[str, int], *, sharded: bool) -> list[str]:
    """Gradients after a backward, with their placements, and what two optimizers' steps have communicated."""
    zoo = model_of(name)
    zoo.need()
    torch.manual_seed(3)  # inputs that are drawn
    model = zoo.build().double()
    parallelize(model, plan_of(name, sizes, sharded))
    inputs = zoo.inputs() if "cp" not in sizes else {"input_ids": tokens()}
    zoo.objective(model, inputs).backward()
    found = []
    for path, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
        if gradient.placements != parameter.placements or gradient.device_mesh != parameter.device_mesh:
            found.append(f"{path}: {gradient.placements} instead of {parameter.placements}")
    with record_comms() as ledger:
        for foreach in (True, False):
            torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=foreach).step()
    return found + [f"{record.op} by {record.requester}" for record in ledger.records]


def sizes_of(name: str, wide: str | None) -> dict[str, int]:
    return {axis: 2 if axis == wide else 1 for axis in plan_zoo.about(name).axes}


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_sharded_at_rest_beside_an_axis_of_size_1(name: str) -> None:
    assert placed_otherwise(name, sizes_of(name, "dp"), sharded=True) == []


@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("wide", ["dp", "cp", "tp", None], ids=str)
@pytest.mark.parametrize("name", plan_zoo.names())
def test_every_plan_on_every_mesh(name: str, wide: str | None, sharded: bool) -> None:
    sizes = sizes_of(name, wide)
    if wide in (None, *sizes):
        assert placed_otherwise(name, sizes, sharded=sharded) == []


def train() -> Step:
    model, sizes = MODELS["llama_zero3"], {"dp": 2, "tp": 1}
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: plan_zoo.load("llama_zero3", mesh),
        sizes,
        strict=True,
        objective=model.objective,
    )


def test_numbers_beside_an_axis_of_size_1(ranks: RankPools) -> None:
    MODELS["llama_zero3"].need()
    for step in ranks.run(train, world_size=2):
        assert step.is_same(1e-12), step
