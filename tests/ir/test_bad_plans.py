"""The corpus of bad plans: each mistake found, once, with its place; nothing found in the plans of the zoo."""

from __future__ import annotations

import functools
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.ir.models import build, llama
from tests.plan_zoo.models import model_of
from vescale import plan_zoo
from vescale.ir import LoweringError, check, lower
from vescale.plans import Plan, PlanError

CORPUS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "bad_plans.yaml").read_text())


@functools.cache
def model(name: str) -> nn.Module:
    return build(name)


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["name"]).replace(" ", "-"))
def test_each_mistake_is_found_once_with_its_place(case: dict[str, Any]) -> None:
    plan = Plan.from_yaml(case["plan"], case["mesh"])
    severity = case.get("severity", "error")
    findings = check(plan, model(case["model"]))
    assert [f.rule for f in findings] == [case["rule"]], [str(f) for f in findings]
    finding = findings[0]
    assert finding.severity == severity
    assert case["message"] in finding.problem
    assert (finding.source.line if finding.source else None) == case["line"]
    if severity == "error":
        with pytest.raises(PlanError) as caught:
            lower(plan, model(case["model"]))
        assert caught.value.problem == finding.problem
    else:
        lower(plan, model(case["model"]))


def test_names_in_the_corpus_are_unique() -> None:
    names = [case["name"] for case in CORPUS]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("name", plan_zoo.names())
def test_nothing_is_found_in_the_zoo(name: str) -> None:
    with torch.device("meta"):
        found = model_of(name).build()
    assert check(plan_zoo.load(name, dict.fromkeys(plan_zoo.about(name).axes, 2)), found) == ()


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_found_in_llama_with_ties(tied: bool) -> None:
    assert check(plan_zoo.load("llama", {"dp": 2, "tp": 2}), llama(tied=tied)) == ()


def test_every_mistake_is_collected() -> None:
    plan = Plan({"tp": 3})
    plan.shard("scale", Shard(0), mesh="tp").shard("fc3.weight", Shard(0), mesh="tp")
    plan.shard("fc2.weight", Shard(5), mesh="tp")
    with pytest.raises(LoweringError) as caught:
        lower(plan, model("mlp"))
    assert sorted(finding.rule for finding in caught.value.findings) == ["dim", "divisible", "no-match"]
    text = str(caught.value)
    assert text.startswith("3 mistakes in the plan:\n") and text.count(__file__) == 3
    assert isinstance(caught.value, PlanError) and caught.value.source == caught.value.findings[0].source


def test_errors_cross_processes() -> None:
    with pytest.raises(LoweringError) as caught:
        lower(Plan({"tp": 3}).shard("fc1.weight", Shard(0)).shard("fc3.weight", Shard(0)), model("mlp"))
    back = pickle.loads(pickle.dumps(caught.value))
    assert str(back) == str(caught.value) and back.findings == caught.value.findings


def test_a_forward_without_a_signature_takes_any_input() -> None:
    module = nn.Module()
    module.forward = max  # type: ignore[assignment]
    assert check(Plan({"tp": 2}).shard("<in:anything>", Replicate()), module) == ()


def test_uneven_cuts_at_rest_are_fine() -> None:
    """Nothing computes with them: only what the module reads must be even."""
    plan = Plan({"dp": 3}).shard("<in:x>", Shard(0)).shard("fc1.weight", Shard(0), phase="init")
    plan.shard("fc1.weight", Replicate(), phase="run")
    assert check(plan, model("mlp")) == ()


@pytest.mark.parametrize(
    ("path", "dim"),
    [
        (r"transformer.h.\d+.mlp.c_proj.weight", 0),  # a feed-forward of the same name
        (r"transformer.h.\d+.attn.c_proj.weight", 1),  # the dim that does not run over heads
        (r"transformer.h.\d+.attn.c_attn.weight", 1),  # packed: heads are not one after the other
    ],
)
def test_cuts_that_pass_by_heads(path: str, dim: int) -> None:
    plan = Plan({"tp": 2}).shard(path, Shard(dim)).shard(path.replace("weight", "<out>"), Replicate())
    assert check(plan, model("gpt2")) == ()


def test_heads_of_another_size_are_left_alone() -> None:
    """Latent attention: 3 heads of 24 in a module that says head_dim=16."""
    attention = nn.Module()
    attention.num_heads, attention.head_dim = 3, 16  # type: ignore[assignment]
    attention.q_proj = nn.Linear(8, 72)
    plan = Plan({"tp": 2}).shard("q_proj.weight", Shard(0))
    assert check(plan, attention) == ()
    attention.head_dim = 24  # type: ignore[assignment]
    assert [f.rule for f in check(plan, attention)] == ["head"]


def test_local_regions_settle_their_own_sums() -> None:
    plan = Plan({"tp": 2}).shard("fc2.weight", Shard(1)).local("", outputs={"tp": Replicate()})
    assert check(plan, model("mlp")) == ()


def test_tied_weights_may_be_named_by_either_name() -> None:
    plan = Plan({"tp": 2}).shard("lm_head.weight", Shard(0)).shard("model.embed_tokens.<out>", Replicate())
    text = lower(plan, model("tied_llama")).to_text()
    assert "model.embed_tokens.init:weight:*:place(tp=S(0))" in text
    assert "lm_head.init" not in text


def test_matching_has_one_budget_for_the_plan() -> None:
    """Expressions that are each slow, but finish, are refused together: the budget is the plan's, not theirs."""
    plan = Plan({"tp": 2})
    for number in range(40):
        plan.shard(rf"(.*)(.*)(.*)(.*)\1\2\3\4.{{{number}}}\4\4|lm_head.weight", Replicate())
    start = time.process_time()
    with pytest.raises(PlanError, match=r"takes too long to match.*without nested repetitions"):
        lower(plan, llama(1))
    assert time.process_time() - start < 5


def test_a_model_is_needed() -> None:
    with pytest.raises(TypeError, match="pass a torch"):
        lower(Plan({"tp": 2}), {})  # type: ignore[arg-type]
