"""Models in stages that checkpoint parts of themselves, against one device: losses, gradients, random numbers; and what runs
twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.examples import daily_sample
from tests.pipeline.steps import Block, Net, make_gpt2, mesh_of, same_steps, token_batch
from tests.ranks import RankPools
from tests.runtime.llama import make_llama
from vescale import parallelize
from vescale.plans import Plan

NAMES = ("ids", "labels")
SPLITS = {"1F1B": [2], "GPipe": [1], "ZBV": [1, 2, 3], "Interleaved1F1B": [1, 2, 3]}


class Inside(Block):
    def __init__(self, options: dict[str, bool]) -> None:
        super().__init__(16, 0.1)
        self.options = options

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, mask, **self.options)


class Checkpointing(Net):
    """``how``: what is checkpointed: a block, a function that calls one, one that calls two, the inside of a block, some
    blocks by ``checkpoint_sequential``, or everything up to the head."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.how, self.options = how, {"use_reentrant": reentrant}
        if how == "inside":
            self.blocks = nn.ModuleList(Inside(self.options) for _ in range(4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.dropout(self.embed(ids) + self.position(torch.arange(ids.shape[1])))
        mask = (ids != 0).unsqueeze(-1).to(x.dtype)
        if self.how == "all":
            x = checkpoint(self.through, x, mask, **self.options)
        elif self.how == "two":
            for one, other in zip(self.blocks[::2], self.blocks[1::2]):
                x = checkpoint(lambda x, one=one, other=other: other(one(x, mask) * 1.5, mask), x, **self.options)
        elif self.how == "sequential":
            calls = [lambda x, block=block: block(x, mask) for block in self.blocks]
            x = checkpoint_sequential(calls, 2, x, **self.options)
        elif self.how == "block":
            for block in self.blocks:
                x = checkpoint(block, x, mask, **self.options)
        elif self.how == "function":
            for block in self.blocks:
                x = checkpoint(lambda x, block=block: 2 * block(x, mask=mask), x, **self.options)
        else:
            x = self.through(x, mask)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}

    def through(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def case(how: str, reentrant: bool, schedule: str) -> tuple[dict[str, float], int]:
    """Differences, and how often the first products of blocks have run in a step of the pipeline, on this rank."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Checkpointing(how, reentrant).double()

    def plan() -> Plan:
        splits = [f"blocks.{n}" for n in SPLITS[schedule]]
        return Plan(mesh_of(pp=2)).pipeline(split_before=splits, schedule=schedule, microbatches=4)

    found = same_steps(make, plan, [token_batch(step, names=NAMES) for step in range(2)])
    model = parallelize(make(), plan())
    for block in model.blocks:
        block.norm.register_forward_pre_hook(counted)
    model.step(**token_batch(0, names=NAMES))
    return found, count


CASES = [
    (how, reentrant, schedule)
    for how in ("block", "function", "two", "inside", "sequential", "all")
    for reentrant in (False, True)
    for schedule in SPLITS
]


@pytest.mark.parametrize(("how", "reentrant", "schedule"), daily_sample(CASES, 8))
def test_what_a_model_checkpoints_itself(ranks: RankPools, how: str, reentrant: bool, schedule: str) -> None:
    for found, count in ranks.run(case, how, reentrant, schedule, world_size=2):
        assert max(found.values()) <= 1e-12, found
        num_forwards = 4 * (2 if schedule != "GPipe" else 1)
        assert how == "sequential" or count >= 2 * num_forwards, "nothing is recomputed"  # it leaves the last ones out


def hugging_face_case(family: str, reentrant: bool) -> dict[str, float]:
    def make() -> nn.Module:
        model = make_gpt2() if family == "gpt2" else make_llama(attention_dropout=0.1, tie_word_embeddings=True)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()

    def plan() -> Plan:
        begins = "transformer.h.2" if family == "gpt2" else "model.layers.1"
        return Plan(mesh_of(pp=2)).pipeline(split_before=[begins], schedule="1F1B", microbatches=4)

    return same_steps(make, plan, [token_batch(step) for step in range(2)])


@pytest.mark.parametrize(
    ("family", "reentrant"), daily_sample([("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)], 2)
)
def test_gradient_checkpointing_enable(ranks: RankPools, family: str, reentrant: bool) -> None:
    for found in ranks.run(hugging_face_case, family, reentrant, world_size=2):
        assert max(found[name] for name in ("gradient", "parameter", "norm")) <= 1e-12, found
