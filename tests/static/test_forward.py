"""Static mode runs what eager mode runs, bit for bit, or falls back to it with a reason."""

from __future__ import annotations

import copy
import functools
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
        self.flag = False
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


class BranchOnSize(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 6:
            x = x * x.shape[1]
        return self.mlp(x)


def branches_on_sizes() -> Any:
    models = both(BranchOnSize)
    for length in (4, 5, 8, 4):
        compare(models, batch(length=length))
    return report(models[1])


class BranchOnData(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        if h.sum() > 0:
            return h
        return h * 3 - self.mlp.down(self.mlp.up(x))


def branches_on_data() -> Any:
    models = both(BranchOnData)
    for sign in (1, 1, -100, 1):
        compare(models, batch() * 0.1 + sign)
    return report(models[1])


class SumOverSize(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp.up(x)
        mean = h.sum(-1) / h.shape[-1]
        return self.mlp(x) * mean.unsqueeze(-1) / len(h)


def traced(function: Any) -> Any:
    """A decorator, as libraries share them among all their functions."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@traced
def rows_of(x: torch.Tensor) -> int:
    return x.shape[0]


@traced
def mean_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight) / rows_of(x)


class DecoratedMlp(Mlp):
    @traced
    @traced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Decorated(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = DecoratedMlp()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    @traced
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        for function in (torch.relu, traced(torch.tanh), traced(traced(torch.sigmoid))):
            h = function(h)
        for change in (self.doubled, self.shifted):
            h = change(h)
        return h * mean_of(h, self.scale).unsqueeze(-1)

    @traced
    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if rows_of(x) else x

    @staticmethod
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + x.shape[1]


def functions_of_one_decorator() -> Any:
    models = both(Decorated)
    for step in range(4):
        compare(models, batch(rows=2 + step, length=4 + step % 3, seed=step))
    return report(models[1])


class Log:
    """Says each sentence once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @functools.cache  # noqa: B019
    def once(self, sentence: str) -> None:
        self.sentences.append(sentence)


LOG = Log()


class Logs(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOG.once("slow")  # runs Python code in the recorded step only
        return self.mlp(x)


def cached_methods() -> Any:
    models = both(Logs)
    LOG.once.cache_clear()
    compare((models[1], models[0]), batch())  # the recorded step comes first
    for step in range(3):
        compare(models, batch(seed=step))
    return report(models[1])


def sizes_as_numbers() -> Any:
    models = both(SumOverSize)
    for step in range(3):
        compare(models, batch(length=4 + step, seed=step))
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


class SumOverDim(Wrapped):
    dim: int

    def __init__(self) -> None:
        super().__init__()
        self.dim = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp.up(x).relu().sum(self.dim).mean() + self.mlp(x).mean()


def numbers_of_modules() -> Any:
    models = both(SumOverDim)
    for dim in (0, 0, 2, 2, 2, 1, 0):
        for model in models:
            model.dim = dim
        compare(models, batch())
    return report(models[1])


class DropoutBeforeBranch(Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        if x.shape[1] > 6:
            x = x * 2
        return self.drop(self.mlp(x))


def random_numbers_of_a_repeated_forward() -> Any:
    models = both(DropoutBeforeBranch)
    for step, length in enumerate((4, 4, 8, 5)):
        compare(models, batch(length=length), seed=step)
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


class WritesAttribute(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.mlp.up(x)
        return self.mlp(x)


def attributes() -> Any:
    models = both(WritesAttribute)
    for step in range(3):
        compare(models, batch(seed=step))
        eager, static = (model.seen for model in models)
        assert type(eager) is type(static) and torch.equal(eager._local_tensor, static._local_tensor)
    return report(models[1])


def hooks_of_users() -> Any:
    models = both(Twice)
    compare(models, batch())
    compare(models, batch())
    shapes: list[Any] = []
    for model in models:
        model.mlp.register_forward_hook(lambda module, args, out: shapes.append((type(out), out.shape)))
    compare(models, batch())
    compare(models, batch())
    assert len(set(shapes)) == 1 and len(shapes) == 8
    return report(models[1])


def settings_of_modules() -> Any:
    """Training and evaluation, attributes, frozen and replaced parameters."""
    models = both(Dropout)
    compare(models, batch())
    compare(models, batch())
    for change in (
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: setattr(m.drop, "p", 0.9),
        lambda m: m.mlp.up.weight.requires_grad_(False),
        lambda m: setattr(m.mlp, "norm", nn.Identity()),
    ):
        for model in models:
            change(model)
        for step in range(3):
            compare(models, batch(seed=step), seed=step)
    with torch.no_grad():
        for step in range(3):
            compare(models, batch(seed=step), backward=False)
    return report(models[1])


class Raises(Wrapped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        if self.flag:
            raise ValueError("of the model")
        return h


def exceptions() -> Any:
    models = both(Raises)
    compare(models, batch())
    compare(models, batch())
    for model in models:
        model.flag = True
        with pytest.raises(ValueError, match="of the model"):
            model(batch())
        model.flag = False
    for _ in range(3):
        compare(models, batch())
    return report(models[1])


def accumulation() -> Any:
    """Several forwards before a backward, and several backwards before a step."""
    models = both(Twice)
    for step in range(3):
        for model in models:
            model.zero_grad()
            losses = [model(batch(seed=seed)).square().mean() for seed in range(3)]
            (losses[0] + losses[1] * 2).backward()
            losses[2].backward()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(p.grad._local_tensor, q.grad._local_tensor), step
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
    functions_of_one_decorator,
    cached_methods,
    random_numbers,
    accumulation,
    forwards_of_several_recordings,
    sizes_as_numbers,
    copies,
    named_parameters_are_dtensors,
    exceptions,
)
FALLBACKS = {
    other_divisions: "not divisible by 2",
    branches_on_sizes: "test_forward.py",
    branches_on_data: "test_forward.py",
    numbers_of_modules: "in place of",
    random_numbers_of_a_repeated_forward: "test_forward.py",
    two_kinds_of_gradients: "sends a gradient",
    attributes: "writes a tensor to its attribute seen",
    hooks_of_users: "hooks",
    settings_of_modules: "requires_grad of parameters has changed",
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
