"""Forwards that read values from their batch, and models that change between steps: as one device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.device import device_type
from tests.pipeline.steps import Net, mesh_of, rel, same_steps, token_batch
from tests.pipeline.test_steps import assert_exact
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.errors import MissingValuesError, ParameterHookError, PipelineWarning
from vescale.pipeline import StagedProgram
from vescale.plans import Plan
from vescale.runtime import MissingValuesWarning

WIDTH = 8


class Branching(nn.Module):
    """Reads of several kinds, around its blocks and inside of them."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, loss: str = "mean") -> None:
        super().__init__()
        self.loss = loss
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.end = nn.Linear(WIDTH, 3)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor, kinds: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.dropout(self.norm(self.first(x)))[:, : int(lengths.max())] if x.ndim == 3 else self.norm(self.first(x))
        if (kinds > 1).any():
            x = x * 2
        if self.table[0] > 0 or kinds[0] == 2:  # a constant, and one row
            x = x + 1
        for block in self.blocks:
            x = block(x, kinds)
        logits = self.end(x)
        if self.loss == "mean":
            return {"loss": F.cross_entropy(logits.flatten(1, -2).sum(1) if x.ndim == 3 else logits, kinds)}
        return {"loss": logits.square().sum() / lengths.sum().item()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        y = self.mix(x).tanh()
        return x - y if torch.equal(kinds, kinds.flip(0)) else x + y


def values(kinds: list[int], longest: int, seed: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.ones(8, dtype=torch.long)
    lengths[5] = longest
    return {"x": torch.randn(8, 4, WIDTH, generator=draws).double(), "kinds": torch.tensor(kinds), "lengths": lengths}


def batches() -> list[dict[str, torch.Tensor]]:
    """The last micro-batch alone has a 2; the first row is one; the same in both directions; none."""
    return [
        values([0, 1, 0, 1, 0, 1, 0, 2], 4, 0),
        values([2, 1, 0, 1, 0, 1, 0, 1], 2, 1),
        values([0, 1, 2, 1, 1, 2, 1, 0], 2, 2),
        values([0, 1, 0, 1, 0, 1, 0, 1], 3, 3),
    ]


def branches_case(loss: str, dropout: float) -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Branching(dropout, loss=loss).double()

    def plan() -> Plan:
        splits = [f"blocks.{n}" for n in (1, 2, 3)]
        return Plan(mesh_of(pp=2)).pipeline(split_before=splits, schedule="ZBV", microbatches=4)

    return same_steps(make, plan, batches())


@pytest.mark.parametrize(("loss", "dropout"), [("mean", 0.2), ("number", 0.0)])
def test_values_of_the_batch(ranks: RankPools, loss: str, dropout: float) -> None:
    """What a forward reads of a batch (branches, a length, a number that it divides by) is the whole batch's in each
    micro-batch; the signature of all batches is the same."""
    assert_exact(ranks.run(branches_case, loss, dropout, world_size=2))


def simple(dropout: float = 0.0, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Branching(dropout, norm).double()


def split() -> Plan:
    return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4)


def changes_case() -> float:
    """Parameters of the first stage are frozen in turns, and a dropout of the first stage is put into evaluation mode."""
    reference, model = simple(0.2), parallelize(simple(0.2), split())
    worst = 0.0
    for step, on in enumerate(map(bool, (0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1))):
        for each in (reference, model):
            each.zero_grad()
            each.dropout.train(step != 1)
            for name, parameter in each.named_parameters():
                if name.startswith(("first", "blocks.0", "blocks.1")):
                    parameter.requires_grad_(on)
        torch.manual_seed(step)
        expected = reference(**batches()[0])["loss"]
        expected.backward()
        state = torch.get_rng_state()
        torch.manual_seed(step)
        worst = max(worst, rel(model.step(**batches()[0]), expected.detach()))
        assert torch.equal(torch.get_rng_state(), state)
        for name, parameter in model.named_parameters():
            wanted = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (wanted is None), (step, name)
            if wanted is not None:
                worst = max(worst, rel(whole(parameter.grad), wanted))
    return worst


def test_models_that_change_between_steps(ranks: RankPools) -> None:
    assert max(ranks.run(changes_case, world_size=2)) <= 1e-12


class Rows(Branching):
    def forward(self, x: torch.Tensor, kinds: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, kinds)
        return {"logits": self.end(x)}


def drawing_loss(out: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return F.dropout(out["logits"], 0.3).square().sum(), (batch["kinds"] != 0).sum()


def callable_case() -> dict[str, float]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Rows().double()

    def plan() -> Plan:
        return Plan(mesh_of(pp=2)).pipeline(split_before=["blocks.2"], microbatches=4, loss=drawing_loss)

    found = same_steps(make, plan, batches()[:2], loss=drawing_loss)
    found.pop("evaluate")  # it draws in evaluation, too, and nobody has set a seed
    # Without anything that counts: as on one device.
    reference, model = make(), parallelize(make(), plan())
    batch = {**batches()[0], "kinds": torch.zeros(8, dtype=torch.long)}
    torch.manual_seed(0)
    total, count = drawing_loss(reference(**batch), batch)
    (total / count).backward()
    torch.manual_seed(0)
    assert model.step(**batch).isinf() and (total / count).isinf()
    for parameter in (*reference.parameters(), *model.parameters()):
        assert not whole(parameter.grad).isfinite().any()
    return found


def test_callable_losses_draw_their_rows(ranks: RankPools) -> None:
    for found in ranks.run(callable_case, world_size=2):
        assert max(found.values()) <= 1e-12, found


def without_values_case() -> float:
    """Of the meta device; nobody waits for a rank that has raised."""
    with torch.device("meta"):
        model = Net(dropout=0.0).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize(model, split())
    assert (dist.get_rank() == 0) == any(issubclass(w.category, MissingValuesWarning) for w in caught)
    batch = token_batch(0, names=("ids", "labels"))
    with pytest.raises(MissingValuesError):
        model.step(**batch)
    model.to_empty(device=device_type())
    torch.manual_seed(0)
    reference = Net(dropout=0.0).double()
    model.load_state_dict({name: value for name, value in reference.state_dict().items() if name in model.state_dict()})
    expected = reference(**batch)["loss"]
    expected.backward()
    found = rel(model.step(**batch), expected.detach())
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, reference)]
    return max(found, rel(*norms))


def test_models_without_values(ranks: RankPools) -> None:
    assert max(ranks.run(without_values_case, world_size=2, timeout=60)) <= 1e-12


def warns_case() -> tuple[list[str], str]:
    model = parallelize(simple(norm=True), split())
    flat = {
        "x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).double(),
        "kinds": torch.arange(8) % 3,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.step(**flat, lengths=torch.ones(8, dtype=torch.long))
    texts = [str(w.message) for w in caught if issubclass(w.category, PipelineWarning)]
    hooked = simple()
    hooked.first.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ParameterHookError, match=r"'first\.weight'") as raised:
        parallelize(hooked, split())
    return texts, str(raised.value)


def test_what_a_pipeline_tells(ranks: RankPools) -> None:
    first, second = ranks.run(warns_case, world_size=2)
    assert len(first[0]) == 1 and "'norm' computes statistics over the rows" in first[0][0] and not second[0]
    assert first[1] == second[1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.mean()


def test_recurrent_layers_are_balanced_in_seconds() -> None:
    """A step of a recurrent layer is many ops on the meta device: not of 4,096 tokens."""
    plan = Plan({"pp": 2}).pipeline(
        balance="cost", microbatches=2, loss="out", memory_gib=1.0, microbatch_shape=[1, 65536]
    )
    assert StagedProgram.of(plan, Recurrent()).cut.splits == ("layers.1",)
