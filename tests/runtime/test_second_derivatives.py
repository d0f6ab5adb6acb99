"""Derivatives of gradients through a parallelized model: one device's, or an error; never a part of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.examples import NIGHTLY
from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from tests.whole import whole
from vescale import parallelize
from vescale.fsdp import fully_shard
from vescale.plans import Plan

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Critic(nn.Module):
    """Linear layers cut Megatron's way around smooth functions, and what runs on local tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.table = nn.Embedding(6, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "constant":
            x = x * torch.arange(1.0, 7.0, dtype=x.dtype)
        if self.kind == "norm":
            x = F.layer_norm(x, (6,)) + x
        x = x + self.down(torch.tanh(self.up(x)))
        if self.kind == "attention":
            heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
            with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivatives on one device
                x = F.scaled_dot_product_attention(heads, heads.sin(), heads.square()).transpose(1, 2).flatten(2)
        if self.kind == "embedding":
            x = x.square() * self.table(torch.tensor([0, 2, 4, 1]))
        if self.kind == "recurrent":
            x = self.rnn(x)[0]
        if self.kind == "batch norm":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss is a norm of a gradient, as for a critic of Wasserstein GANs."""
    x = x.clone().requires_grad_()
    score = model(x).square().sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return (gradient.square().sum(-1) + 1).sqrt().sum()


def entries(mesh: Any, kind: str) -> Plan:
    plan = Plan(mesh).shard("<in:x>", {"dp": S0})
    plan.shard("up.(weight|bias)", {"tp": S0}).shard("down.weight", {"tp": S1})
    plan.shard("up.<in>", {"tp": R}).shard("down.<out>", {"tp": R})
    return plan.shard("table.weight", {"tp": S0}).shard("table.<out>", {"tp": R}) if kind == "embedding" else plan


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Critic(kind).double())
    return models[0], models[1]


def same(mesh: Any, kind: str) -> None:
    reference, model = pair(kind)
    parallelize(model, entries(mesh, kind))
    x = torch.randn(4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected, found = penalty(reference, x), penalty(model, x)
    torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, expected)
    expected.backward()
    found.backward()
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(
                own.grad.full_tensor(), other.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def gradient_penalties() -> int:
    mesh = make_mesh(dp=2, tp=2)
    return run_cases(
        same, [(mesh, kind) for kind in ("plain", "constant", "norm", "attention", "embedding", "recurrent")]
    )


def test_gradient_penalties(ranks: RankPools) -> None:
    assert set(ranks.run(gradient_penalties)) == {6}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x * self.scale) for f in (torch.sin, torch.cos, torch.square))
        return F.scaled_dot_product_attention(q, k, v)


def refused_batch_norm() -> None:
    _, model = pair("batch norm")
    parallelize(model, entries(make_mesh(dp=2, tp=2), "batch norm"))
    x = torch.randn(4, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with pytest.raises(RuntimeError, match=r"batch_norm over a sharded batch .* normalize with LayerNorm"):
        penalty(model, x).backward()


def refused_ring(linear: bool, chosen: bool) -> None:
    """Also where the gradient that reaches attention is a constant, and where only some derivatives are asked for."""
    model = Attends()
    plan = Plan(make_mesh(cp=4)).shard("<in:x>", {"cp": S2})
    parallelize(model, plan.attention("", "ring", mesh="cp"))
    x = torch.randn(2, 2, 8, 3, dtype=torch.float64, requires_grad=True)
    y = model(x)
    score = y.sum() if linear else y.square().sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"attention: ring on cp: .* write all_gather or ulysses for this axis"):
        torch.autograd.grad(gradient.square().sum(), (model.scale if chosen else x,))


def refused() -> int:
    refused_batch_norm()
    return run_cases(refused_ring, [(linear, chosen) for linear in (False, True) for chosen in (False, True)])


def test_what_has_no_second_derivative_says_so(ranks: RankPools) -> None:
    assert set(ranks.run(refused)) == {4}


def gathered_again(kind: str, seed: int) -> None:
    """Graphs of backwards are differentiated after other forwards, evaluations and graphs, and several times."""
    draw, mesh = random.Random(seed), make_mesh(dp=2)
    kinds = ("penalty", "penalty", "second", "forward", "evaluation", "activation")
    events = [draw.choice(kinds) for _ in range(draw.randint(2, 5))]
    times = draw.randint(1, 3)
    results = []
    for model in pair("plain"):
        if results and kind == "units":
            model = parallelize(model, Plan(mesh).shard("<in:x>", {"dp": S0}).zero(3, axis="dp", units=("up", "")))
        elif results:
            for module in (model.up, model.down, model) if kind == "modules" else (model,):
                fully_shard(module, mesh=mesh)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
        for step in range(2):
            x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            for event in events:
                x = x + 0.1
                if event == "evaluation":
                    with torch.no_grad():
                        found.append(model(x).sum())
                elif event == "second":
                    given = x.clone().requires_grad_()
                    (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
                    (second,) = torch.autograd.grad(first.square().sum(), given, create_graph=True)
                    loss = loss + second.square().mean()
                elif event == "activation":
                    seen: list[torch.Tensor] = []
                    handle = model.up.register_forward_hook(lambda *given, seen=seen: seen.append(given[-1]))
                    score = model(x).square().sum()
                    handle.remove()
                    (first,) = torch.autograd.grad(score, seen[0], create_graph=True)
                    loss = loss + first.square().mean()
                else:
                    loss = loss + (penalty(model, x) if event == "penalty" else model(x).sin().mean())
            for time in range(times):
                loss.backward(retain_graph=time < times - 1)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        results.append([whole(value) for value in (*found, *model.state_dict().values())])
    for expected, value in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


def test_graphs_of_backwards_in_any_order(ranks: RankPools) -> None:
    cases = [(kind, seed) for kind in ("units", "root", "modules") for seed in range(30 if NIGHTLY else 4)]
    assert ranks.run(run_cases, gathered_again, cases, world_size=2) == [len(cases)] * 2
