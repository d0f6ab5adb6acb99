"""The plans that ship: found, readable, short, and right for the models they are for."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest
import torch
import yaml

from tests.ir.models import llama
from vescale import lower, plan_zoo
from vescale.plans import Plan, PlanError


def test_names_and_files() -> None:
    assert "llama" in plan_zoo.names() and list(plan_zoo.names()) == sorted(plan_zoo.names())
    about = plan_zoo.about("llama")
    assert about.axes == ("dp", "tp") and about.description.startswith("Llama")


@pytest.mark.parametrize("name", plan_zoo.names())
def test_plans_fit_the_schema_that_editors_use(name: str) -> None:
    schema = json.loads(resources.files("vescale.plans").joinpath("plan.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    data = yaml.safe_load(plan_zoo.path_of(name).read_text())
    validator.validate(data)
    assert [e.json_path for e in validator.iter_errors({**data, "shards": {}, "mesh": {"dp": 0}})] != []


@pytest.mark.parametrize("name", plan_zoo.names())
def test_plans_are_short_and_survive_a_round_trip(name: str) -> None:
    assert len(plan_zoo.path_of(name).read_text().splitlines()) <= 32
    plan = plan_zoo.load(name, dict.fromkeys(plan_zoo.about(name).axes, 2))
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_unknown_names_and_meshes() -> None:
    with pytest.raises(PlanError, match=r"no plan 'lama' \(plans: .*llama.*\); did you mean 'llama'"):
        plan_zoo.load("lama", {"dp": 2, "tp": 2})
    with pytest.raises(PlanError, match="the plan is for axes dp, tp, but the mesh has dp, mp"):
        plan_zoo.load("llama", {"dp": 2, "mp": 2})


def test_names_are_no_paths() -> None:
    for name in ("../plans/plan.schema", "/etc/passwd", "", "llama.yaml"):
        with pytest.raises(PlanError, match="no plan"):
            plan_zoo.path_of(name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_llama_cuts_every_matrix(tied: bool, biases: bool) -> None:
    model = llama(tied=tied, attention_bias=biases, mlp_bias=biases)
    program = lower(plan_zoo.load("llama", {"dp": 2, "tp": 2}), model)
    cut = {f"{i.path}.{i.target}" for i in program if i.hook.value == "init" and "tp=S" in i.text(program.axes)}
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert matrices <= cut
    if biases:
        assert "model.layers.1.self_attn.q_proj.bias" in cut and "model.layers.1.mlp.up_proj.bias" in cut
        assert "model.layers.1.self_attn.o_proj.bias" not in cut  # added once, to the sum
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
