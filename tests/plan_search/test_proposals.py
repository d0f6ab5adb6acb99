"""Plans that a search proposes lint without a finding, lower, survive YAML, and equal one device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.examples import NIGHTLY
from tests.pipeline.steps import mesh_of, same_steps
from tests.plan_search.models import DEVICES, MODELS, changed, chosen, proposals_of, staged_batch, staged_llama
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from vescale.ir import check, lower
from vescale.plan_search import Choice
from vescale.plans import Plan

POLICIES = ("none", "selective", "full")


def written(folder: Path, model: Any, choice: Choice, plan: Plan) -> str:
    """The path of the plan as YAML, after it has been checked."""
    assert not check(plan, model), choice
    file = folder / "plan.yaml"
    file.write_text(plan.to_yaml())
    assert lower(Plan.from_yaml(file, choice.axes), model).digest() == lower(plan, model).digest()
    return str(file)


def train(name: str, file: str, sizes: dict[str, int]) -> Step:
    case = MODELS[name]
    return one_step(
        case.build, case.inputs(), lambda _, mesh: Plan.from_yaml(file, mesh), sizes, objective=case.objective
    )


def trained(ranks: RankPools, folder: Path, name: str, choice: Choice, plan: Plan, devices: int = DEVICES) -> None:
    file = written(folder, MODELS[name].build(), choice, plan)
    for step in ranks.run(train, name, file, choice.axes, world_size=devices):
        assert step.is_same(1e-6 if name == "mixtral" else 1e-9), (choice, step)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_drawn_proposals_equal_one_device(ranks: RankPools, tmp_path: Path, name: str, seed: int) -> None:
    """Some of all that a search proposes, each with a drawn policy of checkpointing."""
    generator = random.Random(f"{name} {seed}")
    found = [one for one in proposals_of(MODELS[name].build(), MODELS[name].inputs()) if one.choice.pp == 1]
    assert {one.choice.tp for one in found} >= {1, 2} and {one.choice.zero for one in found} == {0, 1, 2, 3}
    for proposal in generator.sample(found, 3 if NIGHTLY else 2):
        trained(ranks, tmp_path, name, *changed(proposal, checkpoint=generator.choice(POLICIES)))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 6])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_odd_numbers_of_devices(ranks: RankPools, tmp_path: Path, name: str, devices: int) -> None:
    """Rows, heads and layers that the ranks do not divide."""
    generator = random.Random(f"{name} {devices}")
    found = [one for one in proposals_of(MODELS[name].build(), MODELS[name].inputs(), devices) if one.choice.pp == 1]
    for proposal in generator.sample(found, min(2, len(found))):
        choice, plan = changed(proposal, checkpoint=generator.choice(POLICIES))
        trained(ranks, tmp_path, name, choice, plan, devices)
    assert found


def test_plans_that_use_no_rank_are_not_proposed() -> None:
    """Three divides neither the rows nor any size: all ranks would compute the same."""
    assert proposals_of(MODELS["net"].build(), MODELS["net"].inputs(), 3) == ()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", {"cp": 2, "dp": 2, "tp": 1, "zero": 3}), ("mixtral", {"ep": 2, "dp": 2, "tp": 1, "zero": 3})],
    ids=["context", "experts"],
)
def test_other_axes(ranks: RankPools, tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """Parts of sequences in attention, and ranks of experts beside those of the batch."""
    inputs = MODELS[name].inputs()
    if "cp" in sizes:  # the zoo's plan takes lengths that 8 runs for each rank divide, so that this one is made here
        inputs = {"input_ids": inputs["input_ids"].repeat(1, 2)}
    choice, plan = chosen(MODELS[name].build(), inputs, **sizes)
    if "cp" in sizes:
        written(tmp_path, MODELS[name].build(), choice, plan)
    else:
        trained(ranks, tmp_path, name, choice, plan)


def staged(file: str, sizes: dict[str, int]) -> dict[str, float]:
    return same_steps(staged_llama, lambda: Plan.from_yaml(file, mesh_of(**sizes)), [staged_batch(), staged_batch()])


@pytest.mark.parametrize("seed", range(4))
def test_drawn_stages_equal_one_device(ranks: RankPools, tmp_path: Path, seed: int) -> None:
    found = [one for one in proposals_of(staged_llama(), staged_batch()) if one.choice.pp > 1]
    assert {one.choice.schedule for one in found} == {"1F1B", "Interleaved1F1B"}
    generator = random.Random(seed)
    choice, plan = changed(generator.choice(found), checkpoint=generator.choice(POLICIES))
    file = written(tmp_path, staged_llama(), choice, plan)
    for result in ranks.run(staged, file, choice.axes, world_size=DEVICES):
        assert result["loss"] <= 1e-6 and result["gradient"] <= 1e-6, (choice, result)
