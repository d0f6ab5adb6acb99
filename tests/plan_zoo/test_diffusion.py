"""Diffusion models: sequences that ranks do not divide, modulation that stays whole, and what the commands say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.examples import NIGHTLY
from tests.plan_zoo.models import MODELS, latents_of_classes, latents_of_texts
from tests.ranks import RankPools
from tests.runtime.hf import Step, one_step
from tests.runtime.zero import sharded_at_rest
from vescale import Plan, plan_zoo
from vescale.cli import main
from vescale.ir import check
from vescale.runtime import ImplicitCommunicationError

pytest.importorskip("diffusers")


def step(name: str, sizes: dict[str, int], inputs: dict[str, torch.Tensor], plan: Any = None) -> Step:
    model = MODELS[name]
    make_plan = plan or (lambda mesh: plan_zoo.load(name, mesh))
    return one_step(
        model.build,
        inputs,
        lambda _, mesh: make_plan(mesh),
        sizes,
        strict=True,
        objective=model.objective,
        batch_axis="dp",
    )


def uneven() -> list[Step]:
    """Nine patches on four ranks, one of which has none; five texts on four ranks, and seven on two (at night)."""
    torch.manual_seed(3)
    sizes = {"dp": 1, "tp": 4}
    return [
        step("dit", sizes, latents_of_classes(6)),
        step("sd3", sizes, latents_of_texts(6, 5)),
        *([step("sd3", {"dp": 2, "tp": 2}, latents_of_texts(6, 7))] if NIGHTLY else []),
    ]


def test_sequences_that_the_ranks_do_not_divide(ranks: RankPools) -> None:
    for found in ranks.run(uneven):
        for one in found:
            assert one.is_same(1e-9) and one.implicit == 0, one


def without_modulation(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    for entry in plan_zoo.load("dit", mesh).entries:
        if not any(part in entry.path.text for part in ("norm1", "proj_out_1")):
            plan.add(entry)
    return plan


def whole_modulation() -> Step:
    torch.manual_seed(3)
    return step("dit", {"dp": 1, "tp": 2}, latents_of_classes(), without_modulation)


def test_modulation_that_is_whole_costs_nothing(ranks: RankPools) -> None:
    """Its gradient is a sum over the ranks' parts of the sequence, and stays one down to the parameters."""
    for found in ranks.run(whole_modulation, world_size=2):
        assert found.is_same(1e-9) and found.implicit == 0, found
        assert dict(found.collectives) == {("reduce_scatter_v", "tp"): 4 * 2, ("all_gather_v", "tp"): 4 * 2 + 2}


def without_unit() -> str:
    with pytest.raises(ImplicitCommunicationError) as caught:
        step("dit", {"dp": 2, "tp": 1}, latents_of_classes(), lambda mesh: sharded_at_rest(plan_zoo.load("dit", mesh)))
    return str(caught.value)


def test_a_part_of_a_unit_that_is_called_alone(ranks: RankPools) -> None:
    for message in ranks.run(without_unit, world_size=2):
        assert "write `units: ['transformer_blocks.0.norm1.emb']`" in message, message


def test_lint_knows_the_heads_of_both_streams() -> None:
    import diffusers

    with torch.device("meta"):
        model = diffusers.SD3Transformer2DModel(
            num_layers=2, num_attention_heads=3, attention_head_dim=8, caption_projection_dim=24, sample_size=8
        )
    found = {
        name for f in check(plan_zoo.load("sd3", {"dp": 1, "tp": 2}), model) if f.rule == "head" for name in f.names
    }
    for name in ("to_q", "to_v", "to_out.0", "add_k_proj", "to_add_out"):
        assert any(f".attn.{name}." in found_name for found_name in found), (name, found)


def test_commands_take_the_models_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "_class_name": "DiTTransformer2DModel",
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
    }
    Path("config.json").write_text(json.dumps(config))
    Path("other.json").write_text(json.dumps({"_class_name": "NoModel"}))
    model = ["--model", "hf:config.json", "--mesh", "dp=2,tp=2"]
    assert main(["lint", "dit", *model]) == 0
    inputs = ["hidden_states=8x4x32x32", "timestep=8:int64", "class_labels=8:int64"]
    given = [word for text in inputs for word in ("--input", text)]
    capsys.readouterr()
    assert main(["explain", "dit", *model, *given, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["collectives"]
    assert predicted["stopped"] is None
    totals = {(total["when"], total["op"]): total for total in predicted["totals"] if total["axis"] == "tp"}
    assert totals["forward", "all_gather"]["calls"] == 2 * 2 + 1
    assert totals["backward", "reduce_scatter"]["calls"] == 2 * 2
    assert all(total["bytes"] is not None for total in predicted["totals"]), predicted["totals"]
    assert main(["lint", "dit", "--model", "hf:other.json", "--mesh", "dp=2,tp=2"]) == 2
    assert "diffusers has no model NoModel" in capsys.readouterr().err
