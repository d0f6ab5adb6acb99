"""Static mode runs what eager mode runs, bit for bit, or falls back to it with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, mesh_of, tp_plan
from vescale import parallelize
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")


class Wrapped(nn.Module):
    """A model of one :class:`Mlp`, with a forward of the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.seen: Any = None


def batch(rows: int = 3, length: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(seed))


# Cases run on each of two ranks; what they return is the static model's report.


class Twice(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.mlp(x)
        return x


def other_sizes() -> Any:
    models = both(Twice)
    for step in range(5):
        compare(models, batch(rows=2 + step, length=4 + step % 3, seed=step))
    return report(models[1])


class ReadsLast(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) * x[:, -1, 0].sum()


def one_row() -> Any:
    models = both(ReadsLast)
    for step in range(3):
        compare(models, batch(rows=1, seed=step))  # what is read has one element, and the strides of the batch
    return report(models[1])


class Dropout(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.mlp(x)) + torch.rand(8)


def random_numbers() -> Any:
    models = both(Dropout)
    for step in range(4):
        compare(models, batch(seed=step), seed=step)
    return report(models[1])


class TwoKindsOfUses(Wrapped):
    """A whole tensor beside a cut one and beside a whole one: one gradient is a sum over the ranks, the other is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * 2
        h = self.mlp.up(x) * scale
        return self.mlp.down(h.relu()) + x * scale


def two_kinds_of_gradients() -> Any:
    models = both(TwoKindsOfUses)
    for step in range(3):
        compare(models, batch(seed=step))
    return report(models[1])


class UsesTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mlp(x))


def forwards_of_several_recordings() -> Any:
    """Gradients of forwards that were recorded separately are added in the order of eager mode, too."""
    models = both(UsesTwice)
    for rows in (4, 1):
        compare(models, batch(rows=rows))
    for seed in range(4):
        for model in models:
            model.zero_grad()
            losses = [model(batch(seed=3 * seed + n, rows=rows)).square().mean() for n, rows in enumerate((4, 1, 2))]
            (losses[0] + losses[1] * 2 + losses[2]).backward()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(p.grad._local_tensor, q.grad._local_tensor), seed
    return report(models[1])


def copies() -> Any:
    models = both(Twice)
    compare(models, batch())
    compare(models, batch())
    copied = tuple(copy.deepcopy(model) for model in models)
    for step in range(3):
        compare(copied, batch(seed=step))  # type: ignore[arg-type]
    compare(models, batch())
    return report(copied[1])


def named_parameters_are_dtensors() -> Any:
    mesh = mesh_of()
    model = parallelize(Twice(), tp_plan(mesh), mode="static")
    before = {name: (type(p), p.placements) for name, p in model.named_parameters()}
    for _ in range(3):
        model(batch()).square().mean().backward()
    assert before == {name: (type(p), p.placements) for name, p in model.named_parameters()}
    assert model.mlp.up._compiled_call_impl is None
    assert "weight" not in model.mlp.up.__dict__
    with_hooks = model.mlp(batch())  # a part of the model is called in eager mode
    assert isinstance(with_hooks, DTensor)
    assert set(model.state_dict()) == set(before)
    return report(model)


class TwoOutputs(Wrapped):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.mlp(x)
        return h, h * 2


def outputs_without_recorded_gradients() -> Any:
    _, model = both(TwoOutputs)
    for _ in range(2):
        model(batch())[0].square().mean().backward()
    with pytest.raises(RuntimeError, match="got none in the recorded step"):
        model(batch())[1].square().mean().backward()
    return report(model)


def cut_by_rows(mesh: Any) -> Any:
    return tp_plan(mesh).shard("<in>", Shard(0))


def other_divisions() -> Any:
    """Sizes that the ranks share evenly in the recorded step, and not in others, and the other way round."""
    reports = []
    for recorded in (4, 5):
        models = both(Twice, cut_by_rows)
        for step, rows in enumerate((recorded, recorded, 3, 6, 7, 4)):
            compare(models, batch(rows=rows, seed=step))
        reports.append(report(models[1]))
    assert reports[0].static_steps == 3 and reports[1].static_steps == 2, reports
    return reports[0]


STATIC = (
    other_sizes,
    one_row,
    random_numbers,
    forwards_of_several_recordings,
    copies,
    named_parameters_are_dtensors,
)
FALLBACKS = {
    other_divisions: "not divisible by 2",
    two_kinds_of_gradients: "sends a gradient",
    outputs_without_recorded_gradients: "",
}


@pytest.mark.parametrize("case", STATIC, ids=lambda case: case.__name__)
def test_static(ranks: RankPools, case: Any) -> None:
    for found in ranks.run(case, world_size=2):
        assert found.static_steps > 0 and "" in found.static, found
        assert all(
            fallback.path == "" and "backward of the recorded step" in fallback.reason for fallback in found.fallbacks
        ), found


@pytest.mark.parametrize("case", FALLBACKS, ids=lambda case: case.__name__)
def test_fallbacks(ranks: RankPools, case: Any) -> None:
    for found in ranks.run(case, world_size=2):
        assert FALLBACKS[case] in str(found), found
