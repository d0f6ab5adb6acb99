"""Models that carry a ``get_parallel_plan()``: read as plans, and trained with them against one device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale import Plan
from vescale.plans import PlanError

EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": Shard(0),
    "model.layers.*.mlp.experts.down_proj": Shard(0),
    "model.layers.*.mlp.experts.*.down_proj.weight": Shard(0),  # of another form of the model
}


def mixtral(given: Any) -> nn.Module:
    model = MODELS["mixtral"].build()
    model.get_parallel_plan = lambda: given  # type: ignore[assignment]
    return model


def test_entries() -> None:
    given = SimpleNamespace(extra_parallel_plan={"ep": EXPERTS, "emb": {"model.embed_tokens.weight": Shard(0)}})
    plan = Plan.from_model(mixtral(given), {"dp": 1, "ep": 2, "emb": 2}, batch_axes=["dp", "ep"])
    expected = Plan({"dp": 1, "ep": 2, "emb": 2})
    expected.shard(r"model.layers.\d+.mlp.experts.gate_up_proj", Shard(0), mesh="ep")
    expected.shard(r"model.layers.\d+.mlp.experts.down_proj", Shard(0), mesh="ep")
    expected.local(r"model.layers.\d+.mlp.experts", kind="experts", dispatch="all_to_all")
    expected.shard("model.embed_tokens.weight", Shard(0), mesh="emb")
    expected.shard("model.embed_tokens.<in>", Replicate(), mesh="emb")
    expected.shard("model.embed_tokens.<out>", Replicate(), mesh="emb")
    inputs = [e for e in plan.entries if e.path.pattern == ""]
    assert inputs and all(e.placements == (("dp", Shard(0)), ("ep", Shard(0))) for e in inputs)  # type: ignore[union-attr]
    for entry in inputs:
        expected.add(entry)
    assert plan == expected
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("given", [SimpleNamespace(ep_plan=EXPERTS), {"ep": EXPERTS}])
def test_other_forms_and_names(given: Any) -> None:
    plan = Plan.from_model(mixtral(given), {"dp": 2, "tp": 2}, axes={"ep": "tp"}, dispatch="mask")
    assert len([e for e in plan.entries if getattr(e, "dispatch", None) == "mask"]) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returns NoneType, which is no parallel plan"),
        (SimpleNamespace(ep_plan=3), "which is no parallel plan"),
        ({"expert": EXPERTS}, "the mesh has no axis 'expert'"),
        ({"ep": {"model.layers.*.mlp.experts.gate_up_proj": Partial()}}, "Partial.*reads Shard"),
        ({"ep": {"model.layers.*.mlp.experts.gate_up_proj": Shard(1)}}, "reads Shard"),
        ({"ep": {"model.layers.*.mlp.expert.gate_up_proj": Shard(0)}}, "no parameter matches the patterns for 'ep'"),
        ({"ep": {"model.layers.*.self_attn.q_proj.weight": Shard(0)}}, "a weight of one expert cannot be spread"),
    ],
)
def test_what_cannot_be_understood(given: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_model(mixtral(given), {"dp": 1, "ep": 2})


def test_models_and_sizes_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match=r"Linear has no get_parallel_plan\(\)"):
        Plan.from_model(nn.Linear(2, 2), {"ep": 2})
    with pytest.raises(PlanError, match="4 in dim 0, over 3 ranks"):
        Plan.from_model(mixtral({"ep": EXPERTS}), {"ep": 3})


def trained() -> Step:
    given = SimpleNamespace(extra_parallel_plan={"ep": EXPERTS})
    model = MODELS["mixtral"]
    return one_step(
        lambda: mixtral(given),
        model.inputs(),
        lambda m, mesh: Plan.from_model(m, mesh),
        {"dp": 2, "ep": 2},
        strict=True,
        objective=model.objective,
    )


def test_step_equals_one_device(ranks: RankPools) -> None:
    for step in ranks.run(trained):
        assert step.is_same(1e-6) and step.gradient[0] <= 1e-9 and step.implicit == 0, step
        assert step.collectives["all_to_all_v", "ep"] == 8
