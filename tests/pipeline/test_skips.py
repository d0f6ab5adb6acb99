"""Tensors that skip stages: connections from one half of a network to the other, residuals around several stages, the
output of an encoder in a decoder; one device computes the same."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pipeline.steps import Block, Net, mesh_of, same_steps, token_batch
from tests.pipeline.test_composition import FOUR
from tests.pipeline.test_steps import NAMES, assert_exact
from tests.ranks import RankPools
from tests.simulate import simulate
from tests.whole import whole
from vescale import parallelize
from vescale.comm import record_comms
from vescale.pipeline import StagedProgram
from vescale.plans import Plan, PlanError

WORDS, WIDTH = 32, 16


class Branches(nn.Module):
    """As a U-Net: outputs of the first half go to the second, last ones first; around it, a residual of what functions
    computed, and of a block's view; some blocks return what they were given."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.ModuleList(Passing(dropout) for _ in range(4))
        self.up = nn.ModuleList(Passing(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = (ids != 0).unsqueeze(-1).double()
        x = residual = self.dropout(self.embed(ids)) * 2.0
        kept, parts = [], []
        for block in self.down:
            x, mask, state = block(x, mask)
            kept.append(x)
            parts.append(state["half"][..., :4] + 1.0)
            x = F.gelu(x)
        for block in self.up:
            x = x + kept.pop().contiguous()
            x, mask, _ = block(x, mask)
        x = x + residual + torch.cat(parts, dim=-1)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Passing(Block):
    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH, dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:  # type: ignore[override]
        x = super().forward(x, mask)
        return x, mask, {"half": x.chunk(2, dim=-1)[0]}


class Keeping(Passing):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        self.kept = x * 2.0
        return super().forward(x, mask)


class Encoding(nn.Module):
    """One embedding for two sequences and the head; the decoder reads what the encoder made, in every block, and writes in
    place to what it gets."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = (Half(self.shared, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.encoder(ids, None)
        x = self.decoder(ids.roll(1, 1), seen)
        x.mul_(0.5)
        return {"loss": F.cross_entropy(self.head(x + seen).flatten(0, 1), labels.flatten())}


class Half(nn.Module):
    def __init__(self, embed: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, torch.ones(1).double() if seen is None else seen)
        return self.dropout(self.norm(x))


class Collecting(nn.Module):
    """Hooks collect the first argument and the results of blocks, and the result of a module in each of them, as those of
    Hugging Face's ``output_hidden_states`` and ``output_router_logits``; the loss is of some of them, by position."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(8))
        self.head = nn.Linear(WIDTH, WORDS)
        for block in self.blocks.children():
            block.register_forward_hook(self.keep, with_kwargs=True)
            block.get_submodule("up").register_forward_hook(self.keep_inner)

    def keep(self, _: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        self.states += [output] if self.states else [kwargs["x"], output]

    def keep_inner(self, _: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.logits.append((output.float(), output))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.states: list[torch.Tensor] = []
        self.logits: list[tuple[torch.Tensor, torch.Tensor]] = []
        mask = (ids != 0).unsqueeze(-1).double()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x=x, mask=mask)
        x = self.head(x + 0.5 * self.states[1] + self.states[0] + self.states[6].tanh())
        loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())
        loss += 0.1 * torch.cat([inner.double() for _, inner in self.logits], dim=-1).pow(2).mean()
        return {"loss": loss}


MODELS: dict[str, tuple[type[nn.Module], dict[int, list[str]]]] = {
    "branches": (
        Branches,
        {
            2: ["up.0"],
            4: ["down.2", "up.0", "up.2"],
            8: [*(f"down.{n}" for n in (1, 2, 3)), *(f"up.{n}" for n in range(4))],
        },
    ),
    "encoder": (
        Encoding,
        {2: ["decoder.blocks.1"], 4: ["encoder.blocks.1", "decoder.embed", "decoder.blocks.1"]},
    ),
    "collecting": (Collecting, {2: ["blocks.4"], 4: ["blocks.2", "blocks.4", "blocks.6"]}),
}


def skips(name: str, num_ranks: int, stages: int, schedule: str, m: int, model: nn.Module | None) -> dict[str, float]:
    cls, splits = MODELS[name]

    def make() -> nn.Module:
        if model is not None:
            return copy.deepcopy(model)
        torch.manual_seed(0)
        return cls().double()

    def plan() -> Plan:
        made = Plan(mesh_of(pp=num_ranks))
        return made.pipeline(split_before=splits[stages], schedule=schedule, microbatches=m)

    batches = [token_batch(step, names=NAMES) for step in range(2)]
    return same_steps(make, plan, batches, accumulate=True, draws=model is None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("stages", "schedule"), [(4, "Interleaved1F1B"), (4, "ZBV")])
def test_skip_connections(ranks: RankPools, name: str, stages: int, schedule: str) -> None:
    assert_exact(ranks.run(skips, name, 2, stages, schedule, 4, None, world_size=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", FOUR)
def test_skip_connections_by_schedule(name: str, schedule: str) -> None:
    """Simulated, without dropout."""
    cls, splits = MODELS[name]
    torch.manual_seed(0)
    model = cls(0.0).double()
    for num_ranks in (2, 4):
        stages = num_ranks if schedule in ("GPipe", "1F1B") else 2 * num_ranks
        if stages in splits:
            assert_exact(simulate(skips, num_ranks, name, num_ranks, stages, schedule, 8, model))


def counted(name: str, model: nn.Module) -> tuple[dict[int, dict[str, int]], Counter[str]]:
    def plan() -> Plan:
        return Plan(mesh_of(pp=4)).pipeline(split_before=MODELS[name][1][4], schedule="1F1B", microbatches=4)

    batch = token_batch(0, names=NAMES)
    predicted = StagedProgram.of(plan(), model).counts(batch, ())
    model = parallelize(copy.deepcopy(model), plan())
    model.step(**batch)
    with record_comms() as ledger:
        model.step(**batch)
    return predicted, Counter(r.op for r in ledger.records)


@pytest.mark.parametrize("name", MODELS)
def test_counts_of_skip_connections(name: str) -> None:
    torch.manual_seed(0)
    for rank, (predicted, counts) in enumerate(simulate(counted, 4, name, MODELS[name][0](0.0).double())):
        assert (counts["send"], counts["recv"]) == (predicted[rank]["sends"], predicted[rank]["receives"])
    if name == "branches":  # x; what two blocks kept, their parts, and the residual
        assert predicted[0]["sends"] == 4 * 6


class Sharing(Branches):
    """A later stage writes to what an earlier one has made, and reads a view of it that was made there, too."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x, mask = self.embed(ids), torch.ones(1).double()
        early, half = x, x[..., :8]
        for block in self.down:
            x, mask, _ = block(x, mask)
        early.mul_(0.5)
        return {"loss": half.mean() + x.mean()}


class Hidden(Branches):
    """A later stage reads what a module has made and not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.down[0] = Keeping(0.0)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x, mask = self.embed(ids), torch.ones(1).double()
        for block in self.down:
            x, mask, _ = block(x, mask)
        return {"loss": self.down[0].kept.mean() + x.mean()}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Sharing,
            r"stage 1, reads a tensor of shape \(.*8\) that stage 0 has created, and that shares memory .* out of place",
        ),
        (Hidden, r"created in a module of stage 0 but is not part of what the module returns; return it"),
    ],
)
def test_what_cannot_skip(cls: type[nn.Module], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StagedProgram.of(Plan({"pp": 2}).pipeline(split_before=["down.1"], microbatches=2), cls().double())


class Shared(nn.Module):
    """The module before which the second stage begins is one of the first stage, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = self.first

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.second(self.first(ids))
        return {"loss": (x * self.again(ids + 1)).mean()}


def test_a_module_of_two_stages() -> None:
    staged = StagedProgram.of(Plan({"pp": 2}).pipeline(split_before=["again"], microbatches=2), Shared())
    assert staged.cut.bound["first"] == staged.cut.bound["again"] == frozenset({0, 1})
    assert staged.cut.owners == {"first.weight": {0, 1}, "second.weight": {0}, "second.bias": {0}}
    boundary = staged.traced({"ids": torch.arange(4).view(2, 2)}).boundaries[1]
    assert boundary.leaves == () and boundary.num_tensors == 1 and boundary.call == 2


class Detaching(Net):
    """What block ``at`` gets is detached: earlier parameters get no gradient, or that of an exit before it alone."""

    def __init__(self, at: int, has_exit: bool) -> None:
        super().__init__(dropout=0.0, tied=False)
        self.at, self.has_exit, self.exit = at, has_exit, nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, mask, early = self.embed(ids), torch.ones(1).double(), 0.0
        for n, block in enumerate(self.blocks):
            if n == self.at:
                early = x.mean() if self.has_exit else 0.0
                x = x.detach()
            x = block(x, mask)
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()) + early}


def detached_case(at: int, has_exit: bool, schedule: str) -> list[str]:
    """The parameters whose gradient is none here, or on one device, alone; or another one."""
    torch.manual_seed(0)
    one: Any = Detaching(at, has_exit).double()
    splits = [f"blocks.{n}" for n in ((2,) if schedule == "1F1B" else (1, 2, 3))]
    plan = Plan(mesh_of(pp=2)).pipeline(split_before=splits, schedule=schedule, microbatches=4)
    model: Any = parallelize(copy.deepcopy(one), plan)
    batch = token_batch(0, names=("ids", "labels"))
    one(**batch)["loss"].backward()
    model.step(**batch)
    found = []
    for name, parameter in model.named_parameters():
        wanted = one.get_parameter(name).grad
        if (parameter.grad is None) != (wanted is None) or (
            wanted is not None and not torch.allclose(whole(parameter.grad), wanted, 1e-10, 1e-12)
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBV"])
@pytest.mark.parametrize(("at", "has_exit"), [(1, False), (2, False), (3, False), (2, True)])
def test_what_is_detached_between_stages_has_no_gradient(
    ranks: RankPools, at: int, has_exit: bool, schedule: str
) -> None:
    assert ranks.run(detached_case, at, has_exit, schedule, world_size=2) == [[], []]
