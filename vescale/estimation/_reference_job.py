"""Small parallelized models whose steps every rank of a calibration times."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale._parallelize import parallelize
from vescale.estimation._devices import Curve, Device
from vescale.estimation._measured_ops import measure_collectives, measure_ops
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

__all__ = ["Reference", "measure_rank", "on_processors", "references"]

_STEPS = 20
_HEADS, _BLOCKS, _ROWS = 4, 2, 4


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        query, key, value = (one(y).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for one in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass(frozen=True)
class Reference:
    """Data parallel over all ranks.

    Attributes:
        shows: of which kind (:data:`vescale.estimation.HOST_KINDS`) it has more than others; None: of none.
    """

    ranks: int
    width: int
    length: int
    shows: str | None = None

    def model(self) -> nn.Module:
        return _Model(self.width)

    def plan(self, mesh: Any = None) -> Plan:
        plan = Plan(mesh if mesh is not None else {"dp": self.ranks})
        plan.shard("<in:x>", {"dp": Shard(0)})
        if self.shows == "unit":
            plan.shard(".*", {"dp": RaggedShard()}, phase=INIT).shard(".*", {"dp": Replicate()}, phase=RUN)
            plan.unit(r"blocks\.\d+")
        if self.shows == "crossing":
            plan.local(r"blocks\.\d+\.(norm|down)", inputs={"dp": Shard(0)}, outputs={"dp": Shard(0)})
        policy = {"recompute": "full", "saving": "selective"}.get(self.shows or "")
        return plan if policy is None else plan.checkpoint(r"blocks\.\d+", policy)

    @property
    def shape(self) -> tuple[int, ...]:
        return _ROWS * self.ranks, self.length, self.width

    def parts(self) -> tuple[Callable[[], None], ...]:
        """Forward, backward and optimizer of this rank, to be called again and again."""
        torch.manual_seed(0)  # ops before have drawn numbers, not equally many on all ranks
        model = parallelize(self.model(), self.plan(init_device_mesh("cpu", (self.ranks,), mesh_dim_names=("dp",))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.ones(self.shape)

        losses = []

        def forward() -> None:
            losses.append(model(x))

        def backward() -> None:
            losses.pop().backward()

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return forward, backward, update

    def step(self) -> Callable[[], None]:
        """A training step of this rank, to be called again and again."""
        parts = self.parts()

        def step() -> None:
            for part in parts:
                part()

        return step

    def step_seconds(self) -> list[float]:
        """Processor seconds of this rank for a forward, backward and update: medians of several steps."""
        parts = self.parts()
        found = []
        for _ in range(_STEPS):
            times = [time.process_time()]
            for part in parts:
                part()
                times.append(time.process_time())
            found.append([end - begin for begin, end in itertools.pairwise(times)])
        return [statistics.median(part) for part in zip(*found[2:])]


def references(ranks: int) -> tuple[Reference, ...]:
    """A small model, whose step is mostly the host's, and a larger one, whose step is mostly ops; then the small one with
    blocks that are computed again, that save results of some ops, whose parameters are in parts between uses, and that run
    in part on local tensors."""
    small = Reference(ranks, 64, 16)
    kinds = ("recompute", "saving", "unit", "crossing")
    return small, Reference(ranks, 256, 128), *(replace(small, shows=kind) for kind in kinds)


def on_processors(device: Device) -> Device:
    """The same table for processor seconds, which overlap hides nothing of."""
    curves = {
        name: Curve(tuple((size, seconds[-1]) for size, *seconds in curve.points))
        for name, curve in device.collectives.items()
    }
    return replace(device, collectives=curves, overlap=0.0)


def measure_rank(samples: int, rank: int, send: Callable[[Any], None]) -> None:
    """What a rank of a calibration does, for :func:`vescale.comm.messages`."""
    found = {"ops": measure_ops(samples), "collectives": measure_collectives(samples)}
    send(("measured", {**found, "steps": [one.step_seconds() for one in references(dist.get_world_size())]}))
