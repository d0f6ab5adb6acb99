"""``parallelize`` from top to bottom: what fails leaves the model as it was, and a second try works."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import deferred_init, lower, parallelize
from vescale.plans import INIT, RUN, Plan, PlanMismatchError


class Net(nn.Module):
    """Counts its forwards; has a tied weight, a buffer, and hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.calls, self.seen = 0, []
        self.layers[1].register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(tuple(x.shape))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (self.head(x) * self.scale).mean()


def tensors(plan: Plan) -> None:
    plan.shard(r"layers.\d.weight", Shard(0), mesh="x")
    plan.shard(r"layers.\d.<out>", Replicate(), mesh="x")
    plan.checkpoint("layers.1", {"save": ["aten.addmm"]})


def units(plan: Plan) -> None:
    plan.shard("<in:x>", Shard(0), mesh="x")
    plan.shard(r"layers.\d.bias", Shard(0), mesh="x", phase=INIT)
    plan.shard(r"layers.\d.bias", Replicate(), mesh="x", phase=RUN)


def stages(plan: Plan) -> None:
    plan.pipeline(split_before=["layers.1"], mesh="x", microbatches=2, loss="out")


class Stop(BaseException):
    """As KeyboardInterrupt, which the process of a rank takes for its own."""


# What is made to raise, and at which of its calls.
FAILURES: dict[str, list[tuple[str, str, int]]] = {
    "tensors": [
        ("vescale.runtime._install", "place_tensor", 2),
        ("vescale.runtime._install", "add_hooks", 3),
        ("vescale.runtime._install", "meet_foreign_tools", 0),
        ("vescale._parallelize", "run_eagerly", 0),
        ("vescale._parallelize", "adopt_optimizers", 0),
    ],
    "units": [
        ("vescale.runtime._install", "executor_of", 2),
        ("vescale.runtime._install", "add_hooks", 0),
        ("vescale.runtime._plan_units", "give_methods", 0),
        ("vescale._parallelize", "adopt_optimizers", 0),
    ],
    "deferred": [("vescale.runtime._install", "materialize", 0)],
    "stages": [
        ("vescale.pipeline._install", "add_gates", 0),
        ("vescale.pipeline._install", "install", 0),
        ("vescale.runtime._install", "add_hooks", 1),
        ("vescale.pipeline._install", "extend_torch_for_stages", 0),
    ],
}


@contextmanager
def failing(module: str, name: str, call: int, error: BaseException) -> Iterator[None]:
    owner = importlib.import_module(module)
    before, calls = getattr(owner, name), iter(range(1000))

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return before(*args, **kwargs)

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, before)


def held(model: nn.Module) -> Any:
    """Everything that a model's modules hold, by identity."""
    found: Any = []
    for module in model.modules():
        tables = {
            k: dict(v) if isinstance(v, dict) else set(v) for k, v in vars(module).items() if isinstance(v, dict | set)
        }
        found.append((type(module), {k: id(v) for k, v in vars(module).items()}, tables))
    return found


def fails_then_works(kind: str, deferred: bool) -> list[str]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    wrong = []
    for number, failure in enumerate([*FAILURES[kind], *(FAILURES["deferred"] if deferred else [])]):
        torch.manual_seed(0)
        reference = Net()
        torch.manual_seed(0)
        with deferred_init() if deferred else torch.random.fork_rng(enabled=False):
            model = Net()
        plan = Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("x",)))
        globals()[kind](plan)
        before, state, old = held(model), torch.get_rng_state(), dict(model.named_parameters())
        error: BaseException = Stop() if number % 2 else ValueError("in the middle")
        with failing(*failure, error), pytest.raises(type(error)):
            parallelize(model, plan)
        if held(model) != before or not torch.equal(torch.get_rng_state(), state):
            wrong.append(f"{failure}: the model is not as it was")
        if not all(parameter is old[name] for name, parameter in model.named_parameters()):
            wrong.append(f"{failure}: other parameters")
        parallelize(model, plan)
        expected = reference(x)
        expected.backward()
        loss: Any = model.step(x=x) if kind == "stages" else model(x)  # type: ignore[operator]
        if kind != "stages":
            loss.backward()
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        gradients = whole_tensors({name: parameter.grad for name, parameter in model.named_parameters()})
        if not torch.allclose(loss.detach(), expected.detach()) or not all(
            torch.allclose(gradients[name], reference.get_parameter(name).grad)
            for name in gradients  # type: ignore[arg-type]
        ):
            wrong.append(f"{failure}: another loss or gradient after the second try")
    return wrong


@pytest.mark.parametrize(
    ("kind", "deferred"), [("tensors", False), ("tensors", True), ("units", False), ("units", True), ("stages", False)]
)
def test_what_fails_leaves_the_model_as_it_was(ranks: RankPools, kind: str, deferred: bool) -> None:
    assert ranks.run(fails_then_works, kind, deferred, world_size=2) == [[], []]


def wrong_optimizer(make: Callable[[nn.Module], Any], on: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model = Net()
    right = torch.optim.AdamW(model.parameters())
    plan = Plan(init_device_mesh("cpu", (2,), mesh_dim_names=("x",)))
    tensors(plan)
    before, rank = held(model), torch.distributed.get_rank()
    try:
        parallelize(model, plan, optimizer=make(model) if rank in on else right)
    except (ValueError, TypeError, PlanMismatchError) as error:
        assert held(model) == before
        parallelize(model, plan, optimizer=right)
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def of_another_model(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)


def with_factors(model: nn.Module) -> torch.optim.Optimizer:
    """A state of another shape than its parameter's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())]["rows"] = torch.ones(3)
    return optimizer


@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_another_model, "holds none of the model's parameters"),
        (with_factors, "'rows' of 'layers.0.weight' has shape"),
    ],
)
def test_wrong_optimizers_are_refused_before_anything_changes(
    ranks: RankPools, make: Callable[[nn.Module], Any], message: str, on: tuple[int, ...]
) -> None:
    first, second = ranks.run(wrong_optimizer, make, on, world_size=2)
    assert first == second
    assert message in first, first


def test_lowering_runs_no_forward_of_the_model() -> None:
    model = Net()
    plan = Plan({"x": 2})
    tensors(plan)
    first = lower(plan, model)
    assert (model.calls, model.seen) == (0, [])
    assert lower(plan, model) == first
    with pytest.raises(ValueError, match="addbmm"):
        lower(Plan({"x": 2}).checkpoint("layers.1", {"save": ["aten.addbmm"]}), model)
