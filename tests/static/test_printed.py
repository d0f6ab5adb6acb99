"""What a model in static mode runs, as a value and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.static.models import mesh_of, tp_plan
from tests.static.test_forward import Twice, Wrapped
from tests.static.test_forward import batch as batch_of
from vescale import Plan, parallelize
from vescale.errors import StaticRecordError
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN
from vescale.static import RecordedProgram, program

pytestmark = pytest.mark.helper("dispatch")


def batch(rows: int = 4, seed: int = 1) -> torch.Tensor:
    return batch_of(rows, seed=seed)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield mesh_of()
    dist.destroy_process_group()


def built(model: Callable[[], nn.Module], plan: Plan, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return parallelize(model(), plan, mode="static", **options)


def recorded(
    model: Callable[[], nn.Module], plan: Plan, x: torch.Tensor | None = None
) -> tuple[nn.Module, RecordedProgram]:
    made = built(model, plan)
    made(batch() if x is None else x).square().mean().backward()
    return made, program(made)


# Models of the tests across processes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, 2).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Dropped(Wrapped):
    """Random numbers, a module that runs in eager mode, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.counting = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.counting(self.drop(self.mlp(x)))


class Counting(nn.Module):
    """It writes a plain tensor to an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return x * 2


def attention_plan(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    plan.shard(r"(q|k|v).(weight|bias)", Shard(0)).shard(r"o.weight", Shard(1)).shard(r"o.<out>", Replicate())
    return plan


def rows_plan(mesh: DeviceMesh) -> Plan:
    """Rows that two ranks do not share evenly."""
    return tp_plan(mesh).shard("<in>", Shard(0))


def unit_plan(mesh: DeviceMesh) -> Plan:
    """Parameters at rest in parts, over ranks that have other rows (ZeRO-3)."""
    plan = Plan(mesh).shard("<in>", Shard(0))
    plan.shard(".*", RaggedShard(), phase=INIT).shard(".*", Replicate(), phase=RUN)
    return plan.unit("mlp", reshard_after_forward=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[DeviceMesh], Plan]]] = {
    "twice": (Twice, tp_plan),
    "attention": (Attention, attention_plan),
    "dropout": (Dropped, tp_plan),
    "checkpointed": (Twice, lambda mesh: tp_plan(mesh).checkpoint("mlp", "full")),
    "units": (Twice, unit_plan),
}


def test_a_program_tells_types_sites_and_communication(mesh: DeviceMesh, tmp_path: Path) -> None:
    _, found = recorded(*_case("twice", mesh))
    assert found.axes.names == ("tp",) and found.device == "cpu"
    (step,) = found.steps
    assert not step.draws and not step.eager
    (given,), (returned,) = step.inputs, step.outputs
    assert given.kinds(found.axes) == {"tp": "replicated"} and returned.kinds(found.axes)["tp"] in (
        "invariant",
        "replicated",
    )
    linear = next(site for site in found.sites if site.function == "linear")
    assert linear.action == "redistribute" and linear.reason and linear.path == "mlp.down"
    assert [kind.kinds(found.axes)["tp"] for kind in linear.inputs[:2]] == ["sharded", "sharded"]
    shape = next(site for site in found.sites if site.action == "read_sizes")
    assert shape.file.endswith("models.py") and shape.line > 0 and 2 in shape.factors
    view = next(site for site in found.sites if site.action == "take_sizes")
    assert view.function == "view" and 2 in view.factors
    entry = next(site for site in found.sites if site.communication)
    assert entry.communication[0].endswith("over tp")
    assert dict(step.grads)["mlp.up.weight"] == (Shard(0),)

    file = tmp_path / "net.yaml"
    text = found.to_yaml(file)
    assert file.read_text() == text
    data = yaml.safe_load(text)
    assert data["mesh"] == {"tp": 2} and data["steps"][0]["grads"]["mlp.up.weight"] == "tp: S(0)"
    assert {site["action"] for site in data["steps"][0]["sites"]} == {"redistribute", "read_sizes", "take_sizes"}


def _case(name: str, mesh: DeviceMesh) -> tuple[Callable[[], nn.Module], Plan]:
    model, plan = CASES[name]
    return model, plan(mesh)


@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_models_have_a_text(mesh: DeviceMesh, name: str) -> None:
    made, found = recorded(*_case(name, mesh))
    assert found == program(made) and yaml.safe_load(found.to_yaml())["steps"]
    if name == "dropout":
        assert found.steps[0].draws


def test_no_step_was_recorded(mesh: DeviceMesh) -> None:
    with pytest.raises(StaticRecordError, match="no step of the model has been recorded"):
        program(built(*_case("twice", mesh)))
    eager = parallelize(Twice(), tp_plan(mesh))
    with pytest.raises(KeyError, match="static mode"):
        program(eager)
