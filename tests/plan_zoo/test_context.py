"""Plans of the zoo with two lines more, for a long sequence: (dp, cp, tp) ranks against one device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tests.plan_zoo.models import MODELS
from tests.plan_zoo.test_training import COLLECTIVES
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import Plan, plan_zoo
from vescale.placements import InterleavedShard

BALANCED = InterleavedShard(1, 2)
SIZES = {"dp": 1, "cp": 2, "tp": 2}

# Collectives of a layer's attention, forward and backward: q, k, v and the result, and their gradients; keys and values
# packed; blocks of two ranks, again in backward, and their gradients on and home.
ATTENTION = {
    "ulysses": {"all_to_all_v": 8},
    "all_gather": {"all_gather_v": 1, "reduce_scatter_v": 1},
    "ring": {"all_to_all_v": 1 + 1 + 2},
}


def with_context(name: str, mesh: DeviceMesh, method: str, rows: Any) -> Plan:
    plan = plan_zoo.load(name, mesh).shard("<in:input_ids>", rows, mesh="cp")
    return plan.attention(r".*\.(self_)?attn", method, mesh="cp")  # type: ignore[arg-type]


def train(name: str, method: str, rows: Any) -> Step:
    model = MODELS[name]
    return one_step(
        model.build,
        model.inputs(),
        lambda _, mesh: with_context(name, mesh, method, rows),
        SIZES,
        strict=True,
        loss=model.loss,
    )


@pytest.mark.parametrize(
    ("name", "method", "rows"),
    [
        ("llama", "ring", BALANCED),
        ("llama", "all_gather", BALANCED),
        ("llama", "ulysses", BALANCED),
        ("qwen3", "ring", BALANCED),
        ("qwen3", "ring", Shard(1)),
        ("gpt2", "ring", BALANCED),
        ("mixtral", "ring", BALANCED),
        ("qwen3_moe", "ring", BALANCED),
    ],
    ids=str,
)
def test_step_equals_one_device(ranks: RankPools, name: str, method: str, rows: Any) -> None:
    for step in ranks.run(train, name, method, rows):
        assert step.is_same(1e-9), step
        assert step.implicit == 0
        along_cp = {
            op: n for (op, axes), n in step.collectives.items() if axes in ("cp", "cp,tp") and op != "all_reduce"
        }
        assert along_cp == {op: 2 * n for op, n in ATTENTION[method].items()}
        along_tp = {op: n for (op, axes), n in step.collectives.items() if axes == "tp"}
        assert along_tp.pop("all_reduce", 0) <= COLLECTIVES[name]["all_reduce"]  # one of the loss is over both axes
        assert along_tp == {op: n for op, n in COLLECTIVES[name].items() if op != "all_reduce"}
