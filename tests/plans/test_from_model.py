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
from vescale.ir import Unit, lower
from vescale.placements import RaggedShard
from vescale.plans import INIT, PlanError

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


def test_sharded_data_parallelism() -> None:
    """Experts at rest over fsdp, all the rest over fsdp and ep; a tied weight by both of its names."""
    experts = r"model.layers.\d+.mlp.experts.(gate_up|down)_proj"
    plan = Plan.from_model(mixtral({"ep": EXPERTS}), {"ep": 2, "fsdp": 2, "tp": 1})
    at_rest = [(e.path.text, dict(e.placements)) for e in plan.entries if getattr(e, "phase", None) == INIT]  # type: ignore[union-attr]
    ragged = RaggedShard()
    assert at_rest == [(experts, {"fsdp": ragged}), (f"(?!({experts})$).*", {"ep": ragged, "fsdp": ragged})]
    assert all(dict(e.placements).keys() == {"ep", "fsdp"} for e in plan.entries if e.path.pattern == "")  # type: ignore[union-attr]
    assert Plan.from_yaml(plan.to_yaml()) == plan
    tied = MODELS["mixtral"].build()
    tied.lm_head.weight = tied.model.embed_tokens.weight  # type: ignore[union-attr,assignment]
    tied.get_parallel_plan = lambda: {"emb": {"model.embed_tokens.weight": Shard(0)}}  # type: ignore[assignment]
    sizes = {"dp": 2, "emb": 2}
    plan = Plan.from_model(tied, sizes, shard_axis="dp", batch_axes=["dp", "emb"])
    (unit,) = [i.op for i in lower(plan, tied) if isinstance(i.op, Unit) and i.path == "" and i.op.shard == ("dp",)]
    assert unit.names == ("model.embed_tokens.weight",)
    assert Plan.from_model(tied, sizes, shard_axis=None).entries == Plan.from_model(tied, sizes).entries


@pytest.mark.parametrize("given", [SimpleNamespace(ep_plan=EXPERTS), {"ep": EXPERTS}])
def test_other_forms_and_names(given: Any) -> None:
    plan = Plan.from_model(mixtral(given), {"dp": 2, "tp": 2}, axes={"ep": "tp"}, dispatch="mask")
    assert len([e for e in plan.entries if getattr(e, "dispatch", None) == "mask"]) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returns NoneType, which is not a parallel plan"),
        (SimpleNamespace(ep_plan=3), "which is not a parallel plan"),
        ({"expert": EXPERTS}, "the mesh has no axis 'expert'"),
        ({"ep": {"model.layers.*.mlp.experts.gate_up_proj": Partial()}}, "Partial.*reads Shard"),
        ({"ep": {"model.layers.*.mlp.experts.gate_up_proj": Shard(1)}}, "reads Shard"),
        ({"ep": {"model.layers.*.mlp.expert.gate_up_proj": Shard(0)}}, "no parameter matches the patterns for 'ep'"),
        (
            {"ep": {"model.layers.*.self_attn.q_proj.weight": Shard(0)}},
            "the weight of a single expert cannot be distributed",
        ),
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


def trained(sizes: dict[str, int]) -> Step:
    given = SimpleNamespace(extra_parallel_plan={"ep": EXPERTS})
    model = MODELS["mixtral"]
    return one_step(
        lambda: mixtral(given),
        model.inputs(),
        lambda m, mesh: Plan.from_model(m, mesh),
        sizes,
        strict=True,
        objective=model.objective,
    )


@pytest.mark.parametrize("data", ["dp", "fsdp"])
def test_step_equals_one_device(ranks: RankPools, data: str) -> None:
    for step in ranks.run(trained, {data: 2, "ep": 2}):
        assert step.is_same(1e-6) and step.gradient[0] <= 1e-9 and step.implicit == 0, step
        assert step.collectives["all_to_all_v", "ep"] == 8
