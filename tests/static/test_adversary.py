"""Steps that differ from the recorded one, in ways that no guard can foresee: static mode computes what eager mode does, or
raises an error of ours.

Each case is what a model does between two layers, with the activations ``h`` sharded on their last dim, the input ``x`` of
the model, and the number of the step, which it reads where guards do not look. Cases run in eager mode and in static mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import random
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.overrides import TorchFunctionMode

from tests.ranks import RankPools
from tests.static.models import mesh_of, same
from vescale import Plan, parallelize
from vescale.errors import Coded
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")

_STEP = "VESCALE_TEST_STEP"
Case = Callable[["Net", torch.Tensor, torch.Tensor], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def now() -> int:
    """The number of the step; an environment variable, which no guard compares."""
    return int(os.environ[_STEP])


def is_late() -> bool:
    return now() >= 3


class Net(nn.Module):
    def __init__(self, middle: str) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("count", torch.zeros(3))
        self.middle, self.number, self.act = middle, 2.0, torch.relu
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x)
        h = CASES[self.middle](self, h, x)
        return h if isinstance(h, tuple) else self.down(h) * self.scale


def plan_of(mesh: DeviceMesh) -> Plan:
    plan = Plan(mesh)
    plan.shard("(up|other).(weight|bias)", Shard(0))
    plan.shard("(up|other).<in>", Replicate())
    plan.shard("down.weight", Shard(1))
    plan.shard("down.<out>", Replicate())
    return plan


# What is read


@case
def function_of_a_module(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return HELPERS.act(h)


@case
def number_of_a_module(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * h.sum(SETTINGS.DIM, keepdim=True)


@case
def function_of_torch(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return F.relu(h)


@case
def method_of_tensors(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return getattr(h, "softmax" if is_late() else "log_softmax")(-1)


@case
def name_from_a_table(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return {0: torch.tanh, 1: functools.partial(torch.softmax, dim=-1)}[now() % 2](h)


@case
def closure(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    held = [1 if is_late() else 2]
    return (lambda: h.sum(held[0], keepdim=True) * h)()


@case
def cached_property(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h.flip(Reads().dim)


class Reads:
    @functools.cached_property
    def dim(self) -> int:
        return 2 if is_late() else 1

    def __getattr__(self, name: str) -> Any:
        return torch.tanh if is_late() else torch.relu

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return h.cumsum(2 if is_late() else 1)


@case
def any_attribute(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return Reads().anything(h)


@case
def called_object(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return Reads()(h)


@case
def random_dim(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * h.mean(random.choice([1, 2]), keepdim=True)


@case
def random_order(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    parts = [h, x.repeat(1, 1, 2)]
    if np.random.random() > 0.5:
        parts.reverse()
    return parts[0] * parts[0].sum(-1, keepdim=True) + 0 * parts[1]


@case
def context_variable(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    VARIABLE.set(now() // 3)
    return h.softmax(1 + VARIABLE.get())


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


@case
def asynchronous(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    async def work() -> torch.Tensor:
        await asyncio.sleep(0)
        return h.softmax(2 if is_late() else 1)

    return asyncio.run(work())


@case
def generator(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    def parts() -> Any:
        for dim in (2, 1) if is_late() else (1, 2):
            yield h.sum(dim, keepdim=True) + dim

    first, second = parts()
    return h * first - second


@case
def cache(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h.sum(_dim_of(now() // 3), keepdim=True) + h


@functools.lru_cache(maxsize=1)
def _dim_of(number: int) -> int:
    return number + 1


# Which functions run


@case
def data_dependent(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h.softmax(-1) if x.sum() > 0 else h.relu()


@case
def data_dependent_loop(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    for _ in range(int(x[0, 0, 0].item() > 0) + 1):
        h = h * h.sigmoid()
    return h


@case
def early_return(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if is_late():
        return h
    return h.softmax(-1)


@case
def later_end(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    h = h.relu()
    return h.softmax(-1) if is_late() else h


@case
def module_is_skipped(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h if is_late() else h + net.up(x)


@case
def module_is_new(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return net.other(h) if is_late() else h


@case
def modules_by_turns(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return (net.drop, nn.Identity())[now() % 2](h)


@case
def exception_is_caught(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    try:
        if is_late():
            raise KeyError("late")
        h = h.softmax(-1)
    except KeyError:
        h = h.tanh()
    return h


# Which tensors they get


@case
def other_operand(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    g = h.tanh()
    return h * (g if is_late() else h)


@case
def sharded_or_whole(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    wide = x.repeat(1, 1, 2)
    chosen = [h, wide][now() % 2]
    return chosen.sum(-1, keepdim=True) * h


@case
def swapped_operands(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    a, b = h.relu(), h.tanh()
    return a - b if is_late() else b - a


@case
def outputs_are_swapped(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    a, b = net.down(h), net.down(h.relu())
    return (b, a) if is_late() else (a, b)


@case
def output_is_the_input(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    y = net.down(h)
    return (y, x if is_late() else x + 0)


@case
def kept_for_later(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if now() == 3:
        KEPT.append(h.detach())
    return h + KEPT[-1] if now() > 3 else h


@case
def kept_before(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    KEPT.append(h.detach())
    return h + KEPT[-2] if len(KEPT) > 1 else h


@case
def kept_without_a_call(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if now() == 3:
        KEPT.append(h)
    return h + KEPT[-1].detach() if now() > 3 else h.tanh()


KEPT: list[torch.Tensor] = []


@case
def kept_in_a_module(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if now() == 3:
        net.kept = h.detach()
    return h + net.kept if now() > 3 else h


@case
def other_thread(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    found = []

    def work() -> None:
        found.append(h.detach().tanh())

    if not is_late():
        return h + h.detach().tanh()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return h + found[0]


# Outputs in objects


class Output:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.first, self.others = tensors[0], [{"rest": list(tensors[1:])}]

    def __iter__(self) -> Any:
        return iter((self.first, *self.others[0]["rest"]))


class SlottedOutput:
    __slots__ = ("tensors",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def __iter__(self) -> Any:
        return iter(self.tensors)


@case
def output_object(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return one_object(Output(net.down(h), h, h.tanh()))


@case
def output_with_slots(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return one_object(SlottedOutput(net.down(h), h, h.tanh()))


@case
def output_changes_its_order(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    tensors = [net.down(h), h, h.tanh()]
    return one_object(SlottedOutput(*(tensors[::-1] if is_late() else tensors)))


def one_object(found: Any) -> tuple[Any]:
    """One output that is an object."""
    return (found,)


# What else they get


@case
def other_dim(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * torch.sum(h, dim=2 if is_late() else 1, keepdim=True)


@case
def other_slice(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    width = 8 if is_late() else 16
    return F.pad(h[..., :width], (0, 16 - width))


@case
def other_chunks(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.cat(h.chunk(4 if is_late() else 2, dim=-1)[::-1], -1)


@case
def other_shape(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    rows, length, width = h.shape
    heads = 8 if is_late() else 4
    return h.view(rows, length, heads, width // heads).softmax(-1).reshape(rows, length, width)


@case
def sizes_as_numbers(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * (h.shape[-1] + h.numel() + len(h) + h.size(1) + h.nelement())


@case
def other_flag(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h - h.mean(-1, keepdim=True) if is_late() else h - h.mean(1, True)


@case
def other_text(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * F.mse_loss(h, h.detach() + 1, reduction="sum" if is_late() else "mean")


@case
def other_dtype(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h.to(torch.float32 if is_late() else torch.float64).to(torch.float64)


@case
def other_probability(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return F.dropout(h, 0.0 if is_late() else 0.5)


@case
def other_index(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * h[..., (now() * 5) % 16].unsqueeze(-1)


@case
def other_fraction(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * (0.5 + now())


@case
def other_scalar_type(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return h * (np.float64(now()) if is_late() else now())


@case
def where_is_swapped(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    a, b = h.relu(), h.tanh()
    return torch.where(h > 0, *((b, a) if is_late() else (a, b)))


@case
def written_in_place(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    h = h * 2
    return h.mul_(2) if is_late() else h.mul(2)


@case
def written_item(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    h = h * 2
    h[..., 3 if is_late() else slice(None)] = 0.5
    return h


@case
def through_ops(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.ops.aten.softmax.int(h, 2 if is_late() else 1)


# Gradients


@case
def without_gradients(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    with torch.set_grad_enabled(not is_late()):
        g = h.tanh()
    return h + g


@case
def detached(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    g = h.tanh()
    return h + (g.detach() if is_late() else g)


@case
def hook(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    h = h.tanh()
    if is_late():
        h.register_hook(lambda grad: grad * 3)
    return h


@case
def in_autocast(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=is_late()):
        g = torch.matmul(h.float(), h.float().transpose(1, 2))
    return h * g.double().sum(-1, keepdim=True)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * grad.sum()


@case
def own_backward(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return Tripled.apply(h) if is_late() else h.tanh()


@case
def always_own_backward(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    return Tripled.apply(h)


@case
def parameter_is_set(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if is_late():
        net.scale.data = net.scale.data * 1.5
    return h


@case
def parameter_is_always_set(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    net.scale.data = net.scale.data * 1.5
    return h


@case
def parameter_is_written(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    with torch.no_grad():
        net.scale.mul_(1.5 if is_late() else 1.25)
    return h


@case
def buffer_is_counted(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    net.count += 1
    return h * net.count.sum()


# Other modes


class Scaled(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if getattr(func, "__name__", "") == "tanh" else made


@case
def mode_inside(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    with Scaled():
        return h.tanh()


@case
def mode_inside_later(net: Net, h: torch.Tensor, x: torch.Tensor) -> Any:
    if is_late():
        with Scaled():
            return h.tanh()
    return h.tanh()


HELPERS, SETTINGS = types.ModuleType("helpers"), types.ModuleType("settings")
SETTINGS_AND_HELPERS = {
    "function_of_a_module": (HELPERS, "act", torch.relu, lambda h: h.softmax(-1)),
    "number_of_a_module": (SETTINGS, "DIM", 1, 2),
    "function_of_torch": (F, "relu", F.relu, lambda h: torch.softmax(h, -1)),
}


def tensors_of(result: Any) -> list[torch.Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    return [x for one in found for x in (one if isinstance(one, Output | SlottedOutput) else (one,))]


def run(name: str) -> str:
    """Steps of a case in eager and in static mode, on each rank."""
    mesh, models = mesh_of(), []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        models.append(parallelize(Net(name).double(), plan_of(mesh), mode=mode))
    held: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    replaced = SETTINGS_AND_HELPERS.get(name)
    for step in range(6):
        x = torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        results: list[Any] = []
        for number, model in enumerate(models):
            os.environ[_STEP] = str(step)
            KEPT[:] = held[number]
            if replaced is not None:
                setattr(*replaced[:2], replaced[3 if step >= 3 else 2])
            random.seed(step)
            np.random.seed(step)
            torch.manual_seed(step)
            model.zero_grad()
            try:
                result = model(x)
                result = tensors_of(result)
                sum(y.square().mean() for y in result).backward()
            except Exception as problem:
                if number == 1 and isinstance(problem, Coded):  # of ours
                    return f"{type(problem).__name__}: {problem}"
                raise
            finally:
                held[number] = list(KEPT)
                if replaced is not None:
                    setattr(*replaced[:3])
            results.append(result)
        for eager, static in zip(*results, strict=True):
            assert same(eager, static), f"{name}, step {step}: {report(models[1])}"
        pairs = zip(models[0].named_parameters(), models[1].named_parameters(), strict=True)
        for (parameter, p), (_, q) in pairs:
            assert same(p, q), f"{name}, step {step}: {parameter} differs; {report(models[1])}"
            assert (p.grad is None) == (q.grad is None), f"{name}, step {step}: {parameter}; {report(models[1])}"
            assert p.grad is None or same(p.grad, q.grad), (
                f"{name}, step {step}: the gradient of {parameter} differs; {report(models[1])}"
            )
        for (buffer, p), (_, q) in zip(models[0].named_buffers(), models[1].named_buffers(), strict=True):
            assert same(p, q), f"{name}, step {step}: {buffer} differs; {report(models[1])}"
    return str(report(models[1]))


def run_all(names: list[str]) -> dict[str, str]:
    """What became of the cases: ``static`` or ``eager``, an error of ours, or what went wrong."""
    found = {}
    warnings.simplefilter("ignore")
    for name in names:
        try:
            found[name] = run(name)
        except Exception as problem:
            found[name] = f"wrong: {type(problem).__name__}: {problem}"
    return found


def test_steps_that_differ(ranks: RankPools) -> None:
    """Equal to eager mode, or an error of ours; the same on all ranks."""
    answers = ranks.run(run_all, list(CASES), world_size=2)
    texts = {name: [_without_ranks(found[name]) for found in answers] for name in CASES}
    wrong = [name for name, (one, other) in texts.items() if one != other or one.startswith("wrong")]
    assert not wrong, "\n".join(f"{name}:\n  rank 0: {texts[name][0]}\n  rank 1: {texts[name][1]}" for name in wrong)


def _without_ranks(text: str) -> str:
    """An answer without the sizes of this rank's part."""
    return re.sub(r"torch\.Size\(\[[\d, ]*\]\)", "(...)", text)


# Around the model


def second_derivatives(from_step: int) -> str:
    """A penalty on the gradients, as in WGAN-GP."""
    mesh, models = mesh_of(), []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        models.append(parallelize(Net("later_end").double(), plan_of(mesh), mode=mode))
    os.environ[_STEP] = "0"
    for step in range(5):
        x = torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for model in models:
            model.zero_grad()
            loss = model(x).tanh().square().mean()
            if step >= from_step:
                grads = torch.autograd.grad(loss, [model.up.weight, model.scale], create_graph=True)
                loss = loss + sum(grad.square().sum() for grad in grads)
            loss.backward()
        for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
            assert p.grad is None or same(p.grad, q.grad), (step, name, str(report(models[1])))
    return str(report(models[1]))


def test_second_derivatives(ranks: RankPools) -> None:
    found = ranks.run(second_derivatives, 0, world_size=2)[0]
    assert found.startswith("0 static steps") and "create_graph" in found


def test_second_derivatives_that_come_later(ranks: RankPools) -> None:
    with pytest.raises(Exception, match=r"create_graph=True\) was called on a model in static mode") as caught:
        ranks.run(second_derivatives, 3, world_size=2)
    assert "StaticStepError" in str(caught.value)


def mode_around() -> str:
    mesh, models = mesh_of(), []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        models.append(parallelize(Net("mode_inside_later").double(), plan_of(mesh), mode=mode))
    os.environ[_STEP] = "0"
    for step in range(7):
        x = torch.randn(3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        with Scaled() if step in (3, 4, 5) else contextlib.nullcontext():
            outputs = [model(x) for model in models]
        for out in outputs:
            out.sum().backward()
        assert same(*outputs), step
    return str(report(models[1]))


def test_a_mode_around_the_model_sees_dtensors(ranks: RankPools) -> None:
    found = ranks.run(mode_around, world_size=2)[0]
    assert "a TorchFunctionMode is on" in found and not found.startswith("0 static")
