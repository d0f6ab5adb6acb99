"""Checkpoints of a pipeline are the whole model's: saved with some stages, loaded with others or none, and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.examples import NIGHTLY
from tests.pipeline.steps import Net, mesh_of, rel, token_batch
from tests.ranks import RankPools
from tests.runtime.llama import make_llama
from tests.runtime.zero import sharded_at_rest
from tests.whole import whole
from vescale import checkpoint, parallelize
from vescale.plans import Plan

NAMES = ("ids", "labels")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B": {"splits": [2], "schedule": "1F1B"},
    "ZBV": {"splits": [1, 2, 3], "schedule": "ZBV"},
    "four ranks": {"splits": [1, 2, 3], "schedule": "1F1B", "pp": 4},
    "none": {},
    "ZeRO": {"splits": [1, 2, 3], "schedule": "Interleaved1F1B", "zero": True},
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def placed(model: nn.Module, layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    given = LAYOUTS[layout]
    world = torch.distributed.get_world_size()
    if not given:
        plan = Plan(mesh_of(dp=world))
        for name in NAMES:
            plan.shard(f"<in:{name}>", Shard(0), mesh="dp")
    else:
        stages = given.get("pp", 2)
        plan = Plan(mesh_of(pp=stages, dp=world // stages))
        if given.get("zero"):
            sharded_at_rest(plan, ".*", "dp")
        plan.pipeline(split_before=[f"blocks.{n}" for n in given["splits"]], schedule=given["schedule"], microbatches=4)
    model = parallelize(model, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    batch = token_batch(number, names=NAMES)
    if hasattr(model, "step"):
        loss = model.step(**batch)
    else:
        loss = model(**batch)["loss"]
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return whole(loss.detach())


def journey(folder: str, layouts: list[str]) -> float:
    """One step in each layout, the next begins from what it saved; the largest difference from one device."""
    reference = make_net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    worst, names = 0.0, dict(reference.named_parameters())
    for number, layout in enumerate(layouts):
        torch.manual_seed(50 + number)
        fresh = Net().double()  # other values than the checkpoint's
        model, own = placed(copy.deepcopy(fresh), layout)
        if number:
            checkpoint.load(f"{folder}/{number - 1}", model=model, optimizer=own, rng=False)
        else:
            checkpoint.load(f"{folder}/start", model=model)
        expected, actual = step(reference, optimizer, number), step(model, own, number)
        worst = max(worst, rel(actual, expected))
        for name, parameter in model.named_parameters():
            worst = max(worst, rel(whole(parameter.detach()), names[name].detach()))
        assert set(model.state_dict()) <= set(reference.state_dict())
        checkpoint.save(f"{folder}/{number}", model=model, optimizer=own)
    # Without any mesh.
    single = Net().double()
    last = torch.optim.AdamW(single.parameters(), lr=0.01)
    checkpoint.load(f"{folder}/{len(layouts) - 1}", model=single, optimizer=last)
    for name, parameter in single.named_parameters():
        worst = max(worst, rel(parameter.detach(), names[name].detach()))
        for key, value in last.state[parameter].items():
            worst = max(worst, rel(value, optimizer.state[names[name]][key]))
    assert single.head.weight is single.embed.weight
    return worst


def save_start(folder: str) -> None:
    checkpoint.save(f"{folder}/start", model=make_net())


def test_from_stages_to_others_and_to_none(ranks: RankPools, tmp_path: Any) -> None:
    ranks.run(save_start, str(tmp_path), world_size=2)
    assert max(ranks.run(journey, str(tmp_path), ["1F1B", "ZBV", "none", "1F1B"], world_size=2)) <= 1e-12


def test_from_units_in_stages(ranks: RankPools, tmp_path: Any) -> None:
    ranks.run(save_start, str(tmp_path), world_size=4)
    assert max(ranks.run(journey, str(tmp_path), ["ZeRO", "none", "ZeRO"], world_size=4)) <= 1e-12


def from_hugging_face(folder: str) -> float:
    with torch.device("cpu"):  # where the files were made, with its random numbers
        reference = make_llama(tie_word_embeddings=True)
    model = make_llama(tie_word_embeddings=True)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["model.layers.1"], microbatches=2)
    model = parallelize(model, plan)
    checkpoint.load(folder, model=model)
    names = dict(reference.named_parameters())
    return max(rel(whole(p.detach()).cpu(), names[name].detach()) for name, p in model.named_parameters())


def test_from_files_of_hugging_face(ranks: RankPools, tmp_path: Any) -> None:
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert ranks.run(from_hugging_face, str(tmp_path), world_size=2) == [0.0, 0.0]


def with_checkpointer(folder: str, layouts: list[str]) -> float:
    """As ``journey``: each layout restores the newest step of the folder, makes one step, and saves it."""
    reference = make_net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    worst, names = 0.0, dict(reference.named_parameters())
    for number, layout in enumerate(layouts):
        torch.manual_seed(50 + number)
        model, own = placed(Net().double() if number else make_net(), layout)
        with checkpoint.Checkpointer(folder) as saved:
            if number:
                assert saved.restore(model=model, optimizer=own) is not None
            expected, actual = step(reference, optimizer, number), step(model, own, number)
            saved.save(number, model=model, optimizer=own)
        worst = max(worst, rel(actual, expected))
        for name, parameter in model.named_parameters():
            worst = max(worst, rel(whole(parameter.detach()), names[name].detach()))
    return worst


def test_from_four_stages_and_back(ranks: RankPools, tmp_path: Any) -> None:
    layouts = ["four ranks", "none", "four ranks", *(["1F1B", "four ranks"] if NIGHTLY else [])]
    assert max(ranks.run(with_checkpointer, str(tmp_path), layouts, world_size=4)) <= 1e-12
