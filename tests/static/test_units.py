"""Plans with units (ZeRO, hybrid sharding) in static mode: the bits, and the collectives, of eager mode."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, same
from vescale import Plan
from vescale.comm import record_comms
from vescale.fsdp import state_of
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN
from vescale.runtime import no_sync
from vescale.static import StaticReport, report

pytestmark = pytest.mark.helper("dispatch")

STAGES: dict[str, dict[str, Any]] = {
    "zero1": {"reshard_after_forward": False, "reshard_after_backward": False},
    "zero2": {"reshard_after_forward": False},
    "zero3": {"reshard_after_forward": True},
}


class Blocks(nn.Module):
    """Three layers, of which the first one runs twice; with a parameter of the model's own, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(3)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layers[1].down.bias.requires_grad_(False)
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], *self.layers):
            x = layer(x)
        if self.scale.sum() > 100:
            x = x * 2
        return x * self.scale


def plan_of(stage: str) -> Callable[[DeviceMesh], Plan]:
    def plan(mesh: DeviceMesh) -> Plan:
        made = Plan(mesh)
        names = mesh.mesh_dim_names or ()
        data = [name for name in names if name != "tp"]
        made.shard("<in>", dict.fromkeys(data, Shard(0)))
        if "tp" in names:
            made.shard(r".*\.up.(weight|bias)", Shard(0), mesh="tp")
            made.shard(r".*\.up.<in>", Replicate(), mesh="tp")
            made.shard(r".*\.down.weight", Shard(1), mesh="tp")
            made.shard(r".*\.down.<out>", Replicate(), mesh="tp")
        made.shard(".*", RaggedShard(), mesh="dp", phase=INIT)
        made.shard(".*", Replicate(), mesh="dp", phase=RUN)
        made.unit(r"layers\.\d+", **STAGES[stage])
        return made

    return plan


def batch(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 5, 8, generator=torch.Generator().manual_seed(seed))


def collectives(ledger: Any) -> list[tuple[Any, ...]]:
    """Of a model. What ranks have gathered is compared in the first three such moments along an axis, of whichever model."""
    rows = [(r.op, r.axes, r.requester, r.bytes) for r in ledger.records]
    return [row for row in rows if row[2] != "which units were gathered"]


def steps(stage: str, sizes: dict[str, int]) -> StaticReport:
    """Optimizer steps of several microbatches, of several sizes, in both modes."""
    models = both(Blocks, plan_of(stage), sizes)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]

    def backward(model: nn.Module, seed: int) -> torch.Tensor:
        out = model(batch(seed, rows=4 + 4 * (seed % 2)))
        out.square().mean().backward()
        return out

    for step in range(4):
        found: list[list[Any]] = []
        for model in models:
            with record_comms() as ledger:
                model.zero_grad()
                with no_sync(model):
                    outputs = [backward(model, 3 * step + micro) for micro in range(2)]
                outputs.append(backward(model, 3 * step + 2))
            found.append([outputs, collectives(ledger)])
        assert all(map(same, found[0][0], found[1][0])), step
        assert found[0][1] == found[1][1], (step, report(models[1]), _difference(*(one[1] for one in found)))
        for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert same(p, q) and same(p.grad, q.grad), (step, name)
        for optimizer in optimizers:
            optimizer.step()
    return report(models[1])


def repeated_forwards() -> StaticReport:
    """A branch that was not recorded, behind the last unit: the forward is repeated, and units have run twice."""
    models = both(Blocks, plan_of("zero3"), {"dp": 2})
    for step, factor in enumerate((1, 1, 1000, 1e-3, 1)):
        found: list[list[Any]] = []
        for model in models:
            model.zero_grad()
            scale: Any = model.scale
            with torch.no_grad():
                scale.to_local().mul_(factor)
            out = model(batch(step))
            root = state_of(model)
            assert root is not None
            waiting = (
                len(root.iteration.comm.prefetches),
                [g.forward_places for s in root.iteration.states for g in s.groups],
            )
            with record_comms() as ledger:
                out.square().mean().backward()
            found.append([str(waiting), *collectives(ledger)])
        assert found[0] == found[1], (step, _difference(*found))
        for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert same(p.grad, q.grad), (step, name)
    return report(models[1])


def _difference(expected: list[Any], found: list[Any]) -> str:
    return "\n".join(difflib.unified_diff(list(map(str, expected)), list(map(str, found)), "eager", "static", n=2))


class Recomputed(Mlp):
    """Checkpoints a part of itself."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.tanh(self.up(x)), 0.25, self.training) @ self.down.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class ReturnsView(Mlp):
    """The result of a linear layer with three dims, a view, which the next unit gets as another view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class CallsItself(Mlp):
    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = super().forward(x)
        return (self(x, times - 1) if times else x) + torch.tanh(x) * self.norm.weight


class Layers(nn.Module):
    """Units of a kind; ``uses_weights``: of the first one outside of it."""

    def __init__(self, kind: type[nn.Module], uses_weights: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(2)])
        self.uses_weights = uses_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        first: Any = self.layers[0]
        return x + nn.functional.linear(x * first.norm.weight, first.up.weight)[..., :8] if self.uses_weights else x


KINDS: dict[str, Callable[[], Layers]] = {
    "recomputed": lambda: Layers(Recomputed),
    "calls itself": lambda: Layers(CallsItself),
    "returns a view": lambda: Layers(ReturnsView),
    "weights are used outside": lambda: Layers(Mlp, uses_weights=True),
}


def unit_kinds(stage: str) -> dict[str, StaticReport]:
    found = {}
    for name, build in KINDS.items():
        models = both(build, plan_of(stage), {"dp": 2})
        for seed in range(3):
            compare(models, batch(seed))
        found[name] = report(models[1])
    return found


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_parameters_are_shown_while_their_unit_has_gathered_them(ranks: RankPools, stage: str) -> None:
    for found in ranks.run(unit_kinds, stage, world_size=2):
        assert all(one.static_steps == 2 and "" in one.static for one in found.values()), found
        assert not found["returns a view"].fallbacks, found


MESHES = [{"dp": 2}, {"dp": 2, "tp": 2}, {"replica": 2, "dp": 2}]


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(sizes))
@pytest.mark.parametrize("stage", STAGES)
def test_same_bits_and_collectives(ranks: RankPools, stage: str, sizes: dict[str, int]) -> None:
    for found in ranks.run(steps, stage, sizes, world_size=2 ** len(sizes)):
        assert found.static_steps > 0 and "layers.1" in found.static and "" in found.static, found


def test_repeated_forwards(ranks: RankPools) -> None:
    for found in ranks.run(repeated_forwards, world_size=2):
        assert found.static_steps == 3 and "test_units.py" in str(found), found
