"""What forwards do around their blocks, and losses of other forms: as one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.pipeline.steps import mesh_of, rel, same_steps
from tests.pipeline.test_steps import assert_exact
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.pipeline import StagedProgram
from vescale.plans import Plan, PlanError

WORDS, WIDTH = 16, 8


class Block(nn.Module):
    """Writes in place to what it gets; gets what was computed once before all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x[..., :4].mul_(0.5)
        return F.dropout(self.mix(x).tanh(), 0.1, self.training) * self.scale(condition)[:, None]


class Conditioned(nn.Module):
    """The parent adds what went into a block, reads parameters of its own and of a list, uses a table twice, and takes the
    loss of valid tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.kinds = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.shifts = nn.ParameterList([torch.randn(WIDTH), torch.ones(WIDTH)])
        self.end = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Any, options: Any = None) -> dict[str, torch.Tensor]:
        (ids, labels), kinds = tokens["text"], tokens["kinds"]
        condition = self.kinds(kinds)
        x = self.words(ids) + self.positions + self.shifts[0]
        for block in self.blocks:
            x = x + block(x, condition)
        x = (x + self.end(condition)[:, None]) * self.shifts[1]
        logits = F.linear(x, self.words.weight) * self.temperature.exp()
        valid = labels != -100
        return {"loss": F.cross_entropy(logits[valid], labels[valid])}


# Parameters by name, where a forward with guessed inputs cannot find out who reads them.
STAGES = [
    ["positions", "words", "kinds", "blocks.0", "shifts.0"],
    ["blocks.1"],
    ["blocks.2"],
    ["blocks.3", "end", "temperature", "words.weight", "shifts.1"],
]


def text_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four micro-batches of two rows, of which the first has no valid label."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (8, 5), generator=draws)
    labels = ids.clone()
    for row in range(8):
        labels[row, : 5 if row < 2 else row % 5] = -100
    return ids, labels


def conditioned_case() -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Conditioned().double()

    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(stages=STAGES, schedule="DualPipeV", microbatches=4)

    batches = [
        {"tokens": {"text": text_batch(step), "kinds": torch.arange(8) % 3}, "options": ["any", 3]} for step in range(2)
    ]
    return same_steps(make, plan, batches)


def test_what_the_parent_does(ranks: RankPools) -> None:
    """Four stages, so that the condition passes through two that did not make it."""
    assert_exact(ranks.run(conditioned_case, world_size=2))


def test_parameters_belong_to_the_stages_that_read_them() -> None:
    found = StagedProgram.of(Plan({"pp": 2}).pipeline(split_before=["blocks.2"]), Conditioned()).cut.owners
    both, first, second = frozenset({0, 1}), frozenset({0}), frozenset({1})
    # Its inputs cannot be guessed: parameters of the model itself are of the first stage.
    assert (found["positions"], found["words.weight"], found["temperature"]) == (first, first, first)
    stages = [[*STAGES[0], *STAGES[1]], [*STAGES[2], *STAGES[3]]]
    found = StagedProgram.of(Plan({"pp": 2}).pipeline(stages=stages), Conditioned()).cut.owners
    assert (found["positions"], found["words.weight"], found["temperature"]) == (first, both, second)
    assert (found["shifts.0"], found["shifts.1"]) == (first, second)
    found = StagedProgram.of(
        Plan({"pp": 2}).pipeline(split_before=["blocks.1"], loss="out"), Losses("table")
    ).cut.owners
    assert (found["table"], found["words.weight"], found["scale"]) == (first, both, second)


class NormFirst(nn.Module):
    """The order of its modules is not the order of its calls, as in OPT (final norm) and BART (first norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.end = nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh())
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.begin = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.begin(self.words(input_ids))
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = F.linear(self.end(x), self.words.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def norm_first_case() -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return NormFirst().double()

    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(
            split_before=["blocks.1", "blocks.2", "blocks.3"], schedule="ZBV", microbatches=4
        )

    draws = torch.Generator().manual_seed(0)
    batches = [
        {name: torch.randint(0, WORDS, (8, 5), generator=draws) for name in ("input_ids", "labels")} for _ in range(2)
    ]
    return same_steps(make, plan, batches)


def test_modules_belong_to_the_stages_that_call_them(ranks: RankPools) -> None:
    bound = StagedProgram.of(Plan({"pp": 2}).pipeline(split_before=["blocks.2"]), NormFirst()).cut.bound
    assert (bound["end"], bound["begin"], bound["blocks.1"]) == ({1}, {0}, {0})
    assert_exact(ranks.run(norm_first_case, world_size=2))


class Recurrent(nn.Module):
    """Its own table is read again before the second stage's blocks; recurrent layers; without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(nn.RNN(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.encoder:
            x, _ = layer(x)
        y = F.embedding(ids + 1, self.words.weight)
        for layer in self.decoder:
            y = y + layer(y, x)
        return y


def squares(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    each = (out - batch["target"]).pow(2).mean(-1) * batch["weights"]
    return each.sum(), batch["weights"].sum()


def recurrent_case() -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Recurrent().double()

    def plan() -> Plan:
        splits = ["encoder.1", "decoder", "decoder.1"]  # a list begins with its first module
        return Plan(mesh_of(pp=2)).pipeline(split_before=splits, schedule="ZBV", microbatches=4, loss=squares)

    def batch(step: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(step)
        ids = torch.randint(0, WORDS - 1, (8, 3), generator=draws)
        target, weights = (torch.rand(*shape, generator=draws).double() for shape in ((8, 3, WIDTH), (8, 3)))
        return {"ids": ids, "target": target, "weights": weights}

    return same_steps(make, plan, [batch(step) for step in range(2)], loss=squares)


def test_what_a_stage_sends_of_its_parameters_alone(ranks: RankPools) -> None:
    """The decoder's words are embedded in the second stage, which does not receive them: in the halves of a backward, too.
    What the forward does not take goes to the loss."""
    assert_exact(ranks.run(recurrent_case, world_size=2))


class Losses(nn.Module):
    """A loss of a kind; its head is no module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.table
        for block in self.blocks:
            x = block(x).tanh()
        logits = F.linear(x, self.words.weight)
        rows, targets = logits.flatten(0, 1), labels.flatten()
        valid = targets != -100
        each = F.cross_entropy(rows, targets, reduction="none")
        first = self.kind.split()[0]
        if first == "masked":
            count = valid.sum().clamp(min=1) if "clamp" in self.kind else valid.sum()
            return (each * valid).sum().div(count) if "method" in self.kind else (each * valid).sum() / count
        if first == "product":
            return (1.0 / valid.sum()) * (each * valid).sum()
        if first == "in_place":  # as models with a loss of balance do
            loss = F.cross_entropy(rows, targets)
            term = rows.pow(2).mean()
            loss += 0.01 * (term.sqrt() if "root" in self.kind else term)
            return loss.mul_(2.0)
        found: torch.Tensor = {
            "sum": lambda: F.cross_entropy(rows, targets, reduction="sum"),
            "number": lambda: F.cross_entropy(rows, targets, reduction="sum") / targets.numel(),
            "squares": lambda: rows.pow(2).sum() / len(rows) + F.mse_loss(rows, torch.ones_like(rows)),
            "mse_sum": lambda: F.mse_loss(rows, torch.ones_like(rows), reduction="sum"),
            "row_means": lambda: (each * valid).view_as(labels).sum(1).div((labels != -100).sum(1).clamp(min=1)).mean(),
            "several": lambda: (
                F.cross_entropy(rows, targets, label_smoothing=0.1) * self.scale.exp()
                + 0.01 * torch.logsumexp(rows, -1).pow(2).mean()
                + 0.1 * self.words.weight.pow(2).sum()
            ),
            "stacked": lambda: torch.stack([F.cross_entropy(rows, targets), x.pow(2).mean()]).sum(),
            "root": lambda: rows.pow(2).mean().sqrt(),
            "contrast": lambda: F.cross_entropy(x.mean(1) @ x.mean(1).T, torch.arange(len(ids))),
            "read": lambda: each.sum() / valid.sum().item(),
            "mixed": lambda: rows.pow(2).sum() + F.mse_loss(rows, torch.ones_like(rows)),
            "table": lambda: x.mean() * self.scale,
        }[first]()
        return found


SUMS = [
    "masked",
    "masked clamp method",
    "product",
    "sum",
    "number",
    "squares",
    "mse_sum",
    "row_means",
    "several",
    "stacked",
    "read",
    "in_place",
]
OF_ALL_ROWS = ["in_place root", "root", "contrast", "mixed"]


def losses_case() -> tuple[dict[str, float], dict[str, str]]:
    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.1"], microbatches=4, loss="out")

    worst, messages = {}, {}
    for kind in (*SUMS, *OF_ALL_ROWS):
        torch.manual_seed(0)
        reference = Losses(kind).double()
        try:  # without a batch, which is guessed
            model = parallelize(Losses(kind).double(), plan())
        except PlanError as error:
            messages[kind] = str(error)
            continue
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(reference.get_parameter(name))
        ids, labels = text_batch(0)
        found = model.step(ids=ids, labels=labels)
        expected = reference(ids, labels)
        expected.backward()
        pairs = [(found, expected), (model.evaluate(ids=ids, labels=labels), expected)]
        for name, parameter in model.named_parameters():
            gradient = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (gradient is None), (kind, name)
            if gradient is not None:
                pairs.append((whole(parameter.grad), gradient))
        worst[kind] = max(rel(ours.detach(), theirs.detach()) for ours, theirs in pairs)
    return worst, messages


def test_losses_add_up_to_that_of_the_batch(ranks: RankPools) -> None:
    for worst, messages in ranks.run(losses_case, world_size=2):
        assert set(worst) == {*SUMS, *OF_ALL_ROWS}, messages
        assert all(difference <= 1e-12 for difference in worst.values()), worst
