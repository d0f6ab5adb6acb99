"""What programs do in forwards that stages and their traces have to follow: as one device, or a plan error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate

from tests.pipeline.steps import mesh_of, same_steps, token_batch
from tests.pipeline.test_steps import assert_exact
from tests.ranks import RankPools
from vescale import INIT, RUN, RaggedShard, parallelize
from vescale.plans import Plan, PlanError

WIDTH, WORDS = 8, 32


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "autocast off":
            with torch.autocast(x.device.type, enabled=False), torch.autocast(device_type=x.device.type, enabled=False):
                return x + torch.tanh(self.linear(x))
        return x + torch.tanh(self.linear(x))


class Words(nn.Module):
    def __init__(self, kind: str, norm: nn.Module) -> None:
        super().__init__()
        self.kind = kind
        if kind == "norm first":
            self.norm = norm
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))
        if kind != "norm first":
            self.norm = norm
        self.head = nn.Linear(WIDTH, WORDS)
        self.warned = False

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind == "list index" and 0 in input_ids[:, [-1, 0]]:
            self.warned = True
        x, early = self.embed(input_ids), 0.0 * self.embed.weight.sum()
        for number, block in enumerate(self.blocks):
            if self.kind == "detach" and number == 2:
                x = x.detach()
            x = block(x)
            if "early exit" in self.kind and number == 1:
                early = self._loss(x, labels)
        return {"loss": self._loss(x, labels) + 0.3 * early}


class Chosen(Words):
    """How many tokens or rows the batch's masks choose becomes a number of what is computed around modules."""

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, chosen = self.head(self.norm(x)), labels != -100
        if self.kind == "chosen rows":
            rows = chosen.sum(1) > 2
            return F.cross_entropy(logits[rows].flatten(0, 1), labels[rows].flatten())
        each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        if self.kind == "chosen tokens":
            return (each * (chosen.to(x.dtype) / labels[chosen].numel())).sum()
        return (each * (chosen.to(x.dtype) / len(chosen.nonzero()))).sum()


def chosen(kind: str) -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Chosen(kind, nn.LayerNorm(WIDTH)).double()

    def batch(step: int) -> dict[str, torch.Tensor]:
        found = token_batch(step)
        number = torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(step))
        number[::2] = 0  # each micro-batch has some
        if step == 3:
            number[:2] = 5  # but for the first one, of which no row is chosen
        found["labels"] = found["input_ids"].masked_fill(torch.arange(6) < number[:, None], -100)
        return found

    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out.loss")

    return same_steps(make, plan, [batch(step) for step in (0, 1, 3, 2, 0)])


def test_sizes_that_masks_choose(ranks: RankPools) -> None:
    """They are those of each batch, and not of the first one."""
    for kind in ("chosen rows", "chosen tokens", "positions"):
        assert_exact(ranks.run(chosen, kind, world_size=2))


class Grouped(nn.Module):
    """Its loss groups four rows, which two guessed rows do not fill."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block("") for _ in range(4))

    def forward(self, input_ids: torch.Tensor, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        chosen = self.head(x).log_softmax(-1).gather(-1, input_ids[..., None]).mean((1, 2)).view(-1, 4)
        of_groups = rewards.double().reshape(-1, 4, rewards[0].numel()).mean(-1)
        return {"loss": -(chosen * (of_groups - of_groups.mean(1, keepdim=True))).mean()}


def grouped() -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Grouped().double()

    def batch(step: int) -> dict[str, torch.Tensor]:
        return {"input_ids": token_batch(step)["input_ids"], "rewards": torch.arange(8.0, dtype=torch.float64) ** 2}

    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=2, mesh="pp", loss="out.loss")

    return same_steps(make, plan, [batch(0), batch(1)])


def test_groups_of_more_rows_than_are_guessed(ranks: RankPools) -> None:
    assert_exact(ranks.run(grouped, world_size=2))


class Taught(Words):
    """Its teacher is a moving average of the head, of which the forward, or the script, is the owner."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, nn.LayerNorm(WIDTH))
        self.teacher = nn.Linear(WIDTH, WORDS).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.head.parameters()):
                if self.kind == "data":
                    own.data = 0.9 * own.data + 0.1 * other.data
                else:
                    own.mul_(0.9).add_(0.1 * other)

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.kind != "script":
            self.follow()
        return super()._loss(x, labels) + (self.head(x) - self.teacher(x)).square().mean()


def taught(kind: str) -> str | float:
    torch.manual_seed(0)
    reference = Taught(kind).double()
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out.loss")
    try:
        model = parallelize(copy.deepcopy(reference), plan)
    except PlanError as error:
        return str(error)
    losses: list[list[torch.Tensor]] = [[], []]
    for step in range(3):
        batch = token_batch(step)
        loss = reference(**batch)["loss"]
        loss.backward()
        losses[0].append(loss.detach())
        losses[1].append(model.step(**batch))
        for one in (reference, model):
            torch.optim.SGD(one.parameters(), 0.1).step()
            if one is reference or list(model.head.parameters()):
                one.follow()
            one.zero_grad()
    return float((torch.stack(losses[0]) - torch.stack(losses[1])).abs().max())


def test_frozen_parameters_that_a_forward_writes_to(ranks: RankPools) -> None:
    for kind in ("in place", "data"):
        for found in ranks.run(taught, kind, world_size=2):
            assert "the forward writes to the parameter 'teacher.weight'" in found and "between steps" in found
    assert max(ranks.run(taught, "script", world_size=2)) < 1e-12


KINDS = ["list index", "autocast off", "norm first", "detach", "early exit"]
EARLY_EXIT = [["embed", r"blocks\.[01]", "norm", "head"], [r"blocks\.[23]", "norm", "head"]]


def case(kind: str, schedule: str, units: bool) -> dict[str, float]:
    def plan() -> Plan:
        mesh = mesh_of(pp=2, dp=2) if units else mesh_of(pp=2)
        found = Plan(mesh)
        if units:
            found.shard(".*", RaggedShard(), mesh="dp", phase=INIT).shard(".*", Replicate(), mesh="dp", phase=RUN)
        stages: Any = {"stages": EARLY_EXIT} if "early" in kind else {"split_before": ["blocks.2"]}
        return found.pipeline(**stages, schedule=schedule, microbatches=4, mesh="pp", loss="out.loss")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Words(kind, nn.LayerNorm(WIDTH)).double()

    return same_steps(make, plan, [token_batch(step) for step in range(2)])


@pytest.mark.parametrize("kind", KINDS)
def test_programs(ranks: RankPools, kind: str) -> None:
    assert_exact(ranks.run(case, kind, "1F1B", False, world_size=2))


@pytest.mark.parametrize("kind", ["detach", "early exit"])
def test_programs_with_units(ranks: RankPools, kind: str) -> None:
    assert_exact(ranks.run(case, kind, "GPipe", True, world_size=4))


def frozen(kept: Sequence[str]) -> float:
    """The script's own line takes what requires gradients, which may be nothing on some ranks."""
    losses = []
    for staged in (False, True):
        torch.manual_seed(0)
        model: Any = Words("", nn.LayerNorm(WIDTH)).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(tuple(kept)))
        if staged:
            plan = Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, mesh="pp", loss="out.loss")
            model = parallelize(model, plan)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        found = []
        for step in range(3):
            batch = token_batch(step)
            if staged:
                found.append(model.step(**batch))
            else:
                loss = model(**batch)["loss"]
                loss.backward()
                found.append(loss.detach())
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(torch.stack(found))
    return float((losses[0] - losses[1]).abs().max())


def test_stages_that_are_frozen(ranks: RankPools) -> None:
    for kept in (["head"], ["embed", "blocks.0"]):
        assert max(ranks.run(frozen, kept, world_size=2)) < 1e-12


def refused(norm: Callable[[], nn.Module], stages: Sequence[Sequence[str]]) -> str:
    plan = Plan(mesh_of(pp=2)).pipeline(stages=stages, microbatches=4, mesh="pp", loss="out.loss")
    try:
        parallelize(Words("early exit", norm()).double(), plan).step(**token_batch(0))
    except PlanError as error:
        return str(error)
    return ""


class Counting(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(x)


def plain_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


def test_early_exits_are_refused_with_the_edit(ranks: RankPools) -> None:
    one = [EARLY_EXIT[0], EARLY_EXIT[1][:1]]
    for found in ranks.run(refused, plain_norm, one, world_size=2):
        assert "calls 'norm' in stage 1" in found and "it may be in several" in found
    for found in ranks.run(refused, Counting, EARLY_EXIT, world_size=2):
        assert "'norm', which is called in stages 0, 1, writes to its buffers" in found
    for found in ranks.run(refused, plain_norm, [EARLY_EXIT[0], EARLY_EXIT[0][2:]], world_size=2):
        assert "all modules of stage 1, norm, head, are also in other stages" in found
