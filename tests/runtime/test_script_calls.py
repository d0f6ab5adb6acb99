"""What scripts do with a model besides calling it, against one device: values in the place of parameters, gradients that are
given and asked for one by one or in batches, sequences of unequal lengths; and what is refused, with the edit."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from tests.ranks import RankPools, error_of, run_cases
from tests.runtime.compare import pair
from tests.runtime.test_code_in_backward import columns, rows, zero
from tests.whole import whole
from vescale import (
    parallelize,
    static,  # noqa: F401  (a mode of parallelize)
)
from vescale.fsdp import fully_shard
from vescale.plans import Plan
from vescale.runtime import init_mesh

Tensor = torch.Tensor


def weights() -> Tensor:
    return torch.linspace(1, 2, 6, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(4, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 6)

    def forward(self, x: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        made = self.down(self.middle(torch.tanh(self.up(x))))
        return pad_sequence([made[:length] for length in lengths], batch_first=True) if lengths else made


def inputs() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def adapted(model: nn.Module, steps: int, first_order: bool) -> list[Any]:
    """Two tasks; the parameters after some steps on each depend on those before."""
    for task in (1, 2):
        fast = dict(model.named_parameters())
        for step in range(steps):
            loss = (functional_call(model, fast, (inputs() + step,)) * weights()).square().mean()
            found = torch.autograd.grad(loss, list(fast.values()), create_graph=not first_order)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), found)}
        functional_call(model, fast, (inputs() * task,)).square().mean().backward()
    return gradients(model)


def learned_scale(model: nn.Module) -> list[Any]:
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    values = {name: p * scale for name, p in model.named_parameters()}
    functional_call(model, values, (inputs(),)).square().mean().backward()
    return [scale.grad, *gradients(model)]


def of_leaves(model: nn.Module) -> list[Any]:
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, values, (inputs(),)).square().mean().backward()
    return [value.grad for value in values.values()]


def one_by_one(model: nn.Module) -> list[Any]:
    y, parameters = (model(inputs()) * weights()).sum(0), list(model.parameters())
    return [g for row in torch.eye(6).double() for g in torch.autograd.grad(y, parameters, row, retain_graph=True)]


def in_a_batch(model: nn.Module) -> list[Any]:
    x = inputs().requires_grad_()
    y, asked = (model(x) * weights()).sum(0), [x, *model.parameters()]
    return list(torch.autograd.grad(y, asked, torch.eye(6).double(), is_grads_batched=True))


def jacobians(model: nn.Module) -> list[Any]:
    made = [torch.autograd.functional.jacobian(lambda x: model(x).sum(0), inputs(), vectorize=v) for v in (True, False)]
    return [x for x in made if isinstance(x, Tensor)]


def given(model: nn.Module) -> list[Any]:
    model(inputs()).backward(torch.outer(weights(), weights()))
    return gradients(model)


def padded(model: nn.Module) -> list[Any]:
    made = model(inputs())
    parts = pad_sequence([made[:2], made[1:5], made[3:]], padding_value=0.5)
    (parts.sin().sum() + model(inputs(), (2, 5, 3)).cos().sum()).backward()
    return [parts.detach(), *gradients(model)]


USES: dict[str, tuple[Callable[[nn.Module], list[Any]], Any]] = {
    "one step of adaption": (lambda model: adapted(model, 1, False), (rows, columns)),
    "two steps of adaption": (lambda model: adapted(model, 2, False), (rows, columns)),
    "adaption without second derivatives": (lambda model: adapted(model, 2, True), (rows, columns)),
    "a learned scale": (learned_scale, (rows, columns)),
    "leaves in the place of parameters": (of_leaves, (rows, columns)),
    "gradients one by one": (one_by_one, (rows, columns, zero)),
    "gradients in a batch": (in_a_batch, (rows, columns, zero)),
    "jacobians": (jacobians, (rows, columns, zero)),
    "a gradient that is given": (given, (rows, columns, zero)),
    "padded sequences": (padded, (rows, columns, zero)),
}


def same_numbers(use: str, entries: Callable[[Plan], None]) -> None:
    run = USES[use][0]
    reference, model = pair(Net, entries, {"axis": 2}, strict=False)
    expected, found = run(reference), run(model)
    torch.testing.assert_close([whole(x) for x in found], expected, rtol=1e-10, atol=1e-12)


def test_uses_of_a_model(ranks: RankPools) -> None:
    cases = [(use, entries) for use, (_, plans) in USES.items() for entries in plans]
    assert ranks.run(run_cases, same_numbers, cases, world_size=2) == [len(cases)] * 2


# Refused, with the edit


def parallelized(entries: Callable[[Plan], None] = rows, model: nn.Module | None = None) -> nn.Module:
    plan = Plan(init_mesh("axis=2"))
    entries(plan)
    return parallelize(model or Net(), plan)


def sharded(model: nn.Module | None = None) -> nn.Module:
    return fully_shard(model or Net(), mesh=init_mesh("axis=2"))


def share_a_body() -> None:
    body = Net()
    first, second = nn.Sequential(body, nn.Linear(6, 2)), nn.Sequential(body, nn.Linear(6, 2))
    parallelized(lambda plan: None, first)
    parallelized(lambda plan: None, second)


def transform_with_parameters() -> None:
    model = parallelized()
    values = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda values: functional_call(model, values, (torch.ones(2, 4),)).sum())(values)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (share_a_body, "Parallelize one module that holds both"),
    (transform_with_parameters, "jacobian, jvp, vjp and hvp of torch.autograd.functional"),
    (
        lambda: parallelized(model=nn.Sequential(nn.LazyLinear(3))),
        "Call the model once on one device before parallelize",
    ),
    (lambda: sharded(nn.Sequential(nn.LazyLinear(3))), "Call the model once on one device before fully_shard"),
    (lambda: pickle.dumps(sharded()), r"Save model.state_dict\(\)"),
    (lambda: torch.save(parallelized(zero), io.BytesIO()), r"Save model.state_dict\(\)"),
]


def all_refusals() -> list[str]:
    return [error_of(function) for function, _ in REFUSED]


def test_what_is_refused_names_the_edit(ranks: RankPools) -> None:
    for found in ranks.run(all_refusals, world_size=2):
        for text, (_, edit) in zip(found, REFUSED, strict=True):
            assert re.search(edit, text), text
