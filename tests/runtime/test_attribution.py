"""The module that communication in backward belongs to: forwards on other threads, several models, checkpoints, age."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPools
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationError, implicit_communication
from vescale.runtime._runtime import Runtime


class Block(nn.Module):
    """A layer whose backward may get a Partial gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).tanh()


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.recompute = Block(), Block(), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if self.recompute is None else checkpoint(self.b, x, use_reentrant=self.recompute)


def on_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def built(mesh: Any, *, recompute: bool | None = None) -> nn.Module:
    torch.manual_seed(0)
    # `a` is cut by rows of its weight: what flows back from `b` is Partial, and tanh's derivative needs it whole.
    plan = Plan(mesh).shard("<in:x>", Shard(0)).shard("b.up.weight", Shard(0))
    return parallelize(Model(recompute).double(), plan)


def sites(model: nn.Module) -> set[tuple[str, str]]:
    return {(site.module, site.phase) for site in implicit_communication(model)}


def backward_sites(model: nn.Module, run: Callable[[Callable[[], Any]], Any]) -> set[tuple[str, str]]:
    x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    y = run(lambda: model(x))
    before = dict(implicit_communication(model))
    y.sum().backward()
    after = implicit_communication(model)
    return {(s.module, s.phase) for s, count in after.items() if count != before.get(s, 0)}


def attributed() -> None:
    mesh = make_mesh(tp=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = backward_sites(built(mesh), lambda f: f())
        assert expected and all(phase == "backward" for _, phase in expected), expected
        assert backward_sites(built(mesh), on_thread) == expected
        for recompute in (False, True):
            assert {m for m, _ in backward_sites(built(mesh, recompute=recompute), on_thread)} >= {
                m for m, _ in expected
            }
        # Several models, whose forwards and backwards take turns, and threads whose nodes have equal numbers.
        models = [built(mesh) for _ in range(3)]
        x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
        outputs = [on_thread(lambda m=m: m(x)) for m in models]
        outputs += [m(x) for m in models]
        for y in outputs[::-1]:
            y.sum().backward()
        for model in models:
            assert implicit_communication(model) == implicit_communication(models[0])  # as often, too
            assert {s for s in sites(model) if s[1] == "backward"} == expected


def outside_of_models() -> None:
    """What a script computes with a model's output has numbers of another model's forward on another thread."""
    mesh = make_mesh(tp=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strict = built(mesh)
        x = torch.randn(4, 6, dtype=torch.float64)
        on_thread(lambda: [strict(x) for _ in range(10)])
        before = dict(implicit_communication(strict))
        plan = Plan(mesh).shard("weight", Shard(1)).shard("<in:0>", Shard(1))
        model = parallelize(nn.Linear(6, 6, bias=False).double(), plan)
        loss = on_thread(lambda: model(x).pow(2).sum())  # of a pending sum
        loss.backward()
    assert implicit_communication(strict) == before and not {s for s in sites(model) if s[1] == "backward"}


def refused_in_strict_mode() -> None:
    mesh = make_mesh(tp=2)
    model = built(mesh)
    x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = on_thread(lambda: model(x))
    runtime = Runtime.of(model)
    assert runtime is not None
    runtime.strict = True  # the forward communicates, too
    with pytest.raises(ImplicitCommunicationError, match="backward"):
        y.sum().backward()


def after_many_modules() -> None:
    """The module of an old node, when 200,000 modules have run since, with gradients."""
    mesh = make_mesh(tp=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, others = built(mesh), nn.Sequential(*[nn.Identity() for _ in range(2000)], nn.Tanh())
        parallelize(others, Plan(mesh))
        x = torch.randn(4, 6, dtype=torch.float64).requires_grad_()
        expected = backward_sites(copy.deepcopy(model), lambda f: f())
        y = model(x)
        for _ in range(100):
            others(x)
        before = dict(implicit_communication(model))
        y.sum().backward()
        found = {(s.module, s.phase) for s, n in implicit_communication(model).items() if n != before.get(s, 0)}
        assert found == expected


def test_the_module_of_communication_in_backward(ranks: RankPools) -> None:
    ranks.run(attributed, world_size=2)


def test_what_is_outside_of_models_belongs_to_none(ranks: RankPools) -> None:
    ranks.run(outside_of_models, world_size=2)


def test_strict_mode_sees_forwards_of_other_threads(ranks: RankPools) -> None:
    ranks.run(refused_in_strict_mode, world_size=2)


def test_nodes_are_not_forgotten(ranks: RankPools) -> None:
    ranks.run(after_many_modules, world_size=2)
