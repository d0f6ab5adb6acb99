"""Attention with gathered keys and values runs on local tensors, with the bits and collectives of eager mode."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.static.models import both, compare
from vescale import Plan
from vescale.comm import record_comms
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

HEAD, WIDTH = 4, 16


class Attention(nn.Module):
    options: ClassVar[dict[str, Any]] = {"is_causal": True}
    key_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, self.key_heads * HEAD) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.o(attended.transpose(1, 2).reshape(rows, length, -1))


class Whole(Attention):
    options: ClassVar[dict[str, Any]] = {"scale": 0.3}


class Grouped(Attention):
    options: ClassVar[dict[str, Any]] = {"is_causal": True, "enable_gqa": True}
    key_heads = 2


class Dropped(Attention):
    """What the local function does not do."""

    options: ClassVar[dict[str, Any]] = {"is_causal": True, "dropout_p": 0.2}


def plan(mesh: DeviceMesh) -> Plan:
    made = Plan(mesh).shard("<in>", {"cp": Shard(1)})
    made.attention("", "all_gather", mesh="cp")
    if "tp" in (mesh.mesh_dim_names or ()):
        made.shard("(q|k|v).(weight|bias)", {"tp": Shard(0)})
        made.shard("o.weight", {"tp": Shard(1)})
        made.shard("o.<out>", {"tp": Replicate()})
    return made


def steps(build: type[nn.Module], sizes: dict[str, int]) -> Any:
    models = both(build, plan, sizes)
    generator = torch.Generator().manual_seed(3)
    for length in (8, 8, 8, 4, 4, 6):  # of which several run on the same shapes
        compare(models, torch.randn(2, length, WIDTH, generator=generator))
    found = []
    for model in models:
        with record_comms() as ledger:
            compare((model, model), torch.randn(2, 8, WIDTH, generator=generator))
        found.append([(record.op, record.axes, record.bytes) for record in ledger.records])
    assert found[0] == found[1] and len(found[0]) >= 6, found
    return report(models[1])


@pytest.mark.parametrize("build", [Attention, Whole, Grouped])
def test_gathered_attention(ranks: RankPools, build: type[nn.Module]) -> None:
    for found in ranks.run(steps, build, {"cp": 2}, world_size=2):
        assert found.static_steps >= 6 and not any("attention" in each.function for each in found.eager_functions), (
            found
        )


def test_heads_on_another_axis(ranks: RankPools) -> None:
    for found in ranks.run(steps, Grouped, {"cp": 2, "tp": 2}, world_size=4):
        assert found.static_steps >= 6 and not any("attention" in each.function for each in found.eager_functions), (
            found
        )


def test_other_arguments_run_on_dtensors(ranks: RankPools) -> None:
    for found in ranks.run(steps, Dropped, {"cp": 2}, world_size=2):
        assert found.static_steps >= 5, found
