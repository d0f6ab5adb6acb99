"""Long sequences: the plans of the zoo for a context axis, and other ways to cut and attend, against one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from tests.plan_zoo.models import model_of, tokens
from tests.plan_zoo.test_training import COLLECTIVES, TOLERANCE
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import Plan, plan_zoo
from vescale.placements import InterleavedShard
from vescale.runtime import ImplicitCommunicationError

BALANCED = InterleavedShard(1, 2)
PLANS = tuple(name for name in plan_zoo.names() if name.endswith("_cp"))


def attention_of(method: str, num_ranks: int) -> dict[str, int]:
    """Collectives of a layer's attention, forward and backward."""
    return {
        "ulysses": {"all_to_all_v": 8},  # q, k, v and the result, and their gradients
        "all_gather": {"all_gather_v": 1, "reduce_scatter_v": 1},  # keys and values packed, or latent vectors
        "keys, values": {"all_gather_v": 2, "reduce_scatter_v": 2},
        # Blocks, again in backward, and their gradients on and home.
        "ring": {"all_to_all_v": 2 * (num_ranks - 1) + num_ranks},
    }[method]


@dataclass(frozen=True)
class Way:
    """Another cut and method than the plan for a context axis has."""

    method: Any
    rows: Any


def plan_of(name: str, mesh: DeviceMesh, way: Way | None) -> Plan:
    if way is None:
        return plan_zoo.load(name, mesh)
    plan = plan_zoo.load(name, mesh).shard("<in:input_ids>", way.rows, mesh="cp")
    return plan.attention(r".*\.(self_)?attn", way.method, mesh="cp")


def train(name: str, sizes: dict[str, int], way: Way | None = None) -> Step:
    model = model_of(name)
    return one_step(
        model.build,
        {"input_ids": tokens(length=8 * sizes["cp"] if way is None else 8)},
        lambda _, mesh: plan_of(name, mesh, way),
        sizes,
        strict=True,
        objective=model.objective,
    )


def check(name: str, method: str, sizes: dict[str, int], step: Step) -> None:
    base = name.removesuffix("_cp")
    assert step.is_same(TOLERANCE.get(base, 1e-9)), step
    assert step.implicit == 0
    # The reductions of the loss are over all axes that cut tokens or vocabulary.
    moved = {key: n for key, n in step.collectives.items() if key[0] != "all_reduce" and key[1] != "dp"}
    along_cp = {op: n for (op, axes), n in moved.items() if axes in ("cp", "cp,tp")}
    assert along_cp == {op: 2 * n for op, n in attention_of(method, sizes["cp"]).items()}
    if sizes["tp"] > 1:
        along_tp = {op: n for (op, axes), n in moved.items() if axes == "tp"}
        assert along_tp == {op: n for op, n in COLLECTIVES[base].items() if op != "all_reduce"}
        assert step.collectives["all_reduce", "tp"] <= COLLECTIVES[base]["all_reduce"]


METHODS = {"deepseek_v3_cp": "all_gather", "gpt_oss_cp": "keys, values"}
ALONE = {
    ("deepseek_v3_cp", 2),
    ("gpt_oss_cp", 4),
    ("llama_cp", 4),
}  # each way to attend, without tp; others are marked slow


@pytest.mark.parametrize(
    ("name", "cp", "tp"),
    [
        *(pytest.param(name, 2, 2, marks=[pytest.mark.slow] if name == "deepseek_v3_cp" else []) for name in PLANS),
        *(
            pytest.param(name, cp, 1, marks=[] if (name, cp) in ALONE else [pytest.mark.slow])
            for name in PLANS
            for cp in (2, 4)
        ),
    ],
)
def test_plans_for_a_context_axis(ranks: RankPools, name: str, cp: int, tp: int) -> None:
    sizes = {"dp": 1, "cp": cp, "tp": tp}
    for step in ranks.run(train, name, sizes, world_size=cp * tp):
        check(name, METHODS.get(name, "ring"), sizes, step)


@pytest.mark.parametrize(
    ("name", "method", "rows"),
    [
        pytest.param("llama", "all_gather", BALANCED, marks=pytest.mark.slow),
        ("llama", "ulysses", BALANCED),
        ("llama", "ring", Shard(1)),
        ("llama", "all_gather", Shard(1)),
        ("llama", "ulysses", Shard(1)),
        ("deepseek_v3", "ring", BALANCED),
        pytest.param("deepseek_v3", "all_gather", Shard(1), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "ulysses", BALANCED, marks=pytest.mark.slow),
        pytest.param("qwen3", "ring", Shard(1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_ways(ranks: RankPools, name: str, method: str, rows: Any) -> None:
    sizes = {"dp": 1, "cp": 2, "tp": 2}
    for step in ranks.run(train, name, sizes, Way(method, rows)):
        check(name, method, sizes, step)


def attends_in_its_own_code() -> None:
    with pytest.raises(
        ImplicitCommunicationError, match=r"write `model.layers.\\d\+.self_attn.\(k\|v\)_proj.<out>: {cp: R}`"
    ):
        train("gpt_oss", {"dp": 1, "cp": 2, "tp": 1}, Way("ring", BALANCED))


def test_a_method_that_does_not_apply_says_what_to_write(ranks: RankPools) -> None:
    ranks.run(attends_in_its_own_code, world_size=2)
