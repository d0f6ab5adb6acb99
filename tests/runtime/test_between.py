"""What programs do to parameters between a forward, its backward and the step, and inside of a forward, against one device:
freezing and thawing, ``zero_grad``, ``.data`` that changes places."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.ranks import RankPools, run_cases
from tests.whole import whole_tensors
from vescale import parallelize
from vescale.errors import (
    ForeignToolError,
    FullyShardStateError,
    SetDataError,
    StaticStepError,
    UnsupportedParameterError,
)
from vescale.fsdp import fully_shard
from vescale.plans import Plan

S0, S1 = Shard(0), Shard(1)
KINDS = ("dp", pytest.param("static", marks=pytest.mark.helper("dispatch")), "tp", "units", "modules")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    inside: Callable[[Net], None] | None = None
    """What the forward does first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is not None:
            self.inside(self)
        return self.head(self.second(self.first(x)))


def drawn() -> Net:
    torch.manual_seed(0)
    return Net().double()


def sharded(kind: str, mesh: DeviceMesh) -> Net:
    model = drawn()
    if kind == "modules":
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
        return model
    plan = Plan(mesh)
    if kind == "tp":
        plan.shard(".*up.(weight|bias)", S0).shard(".*down.weight", S1)
    else:
        plan.shard("<in>", S0)
    if kind == "units":
        plan.zero(3, units=("first", ""))
    return parallelize(model, plan, mode="static" if kind == "static" else "eager")


def batch(step: int) -> torch.Tensor:
    """The same on every rank, with a gradient, so that a backward reaches something where all parameters are frozen."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_()


def toggle(model: Net, draw: random.Random) -> None:
    """Freeze or thaw some parameters, or none."""
    what = draw.choice(["some", "thaw", "nothing", "module", "all"])
    if what == "some":
        for name in draw.sample([name for name, _ in model.named_parameters()], 2):
            model.get_parameter(name).requires_grad_(False)
    elif what == "thaw":
        model.requires_grad_(True)
    elif what == "module":
        draw.choice([model.head, model.first, model.second.up]).requires_grad_(draw.random() < 0.5)
    elif what == "all":
        model.requires_grad_(draw.random() < 0.5)


def toggled(model: Net, draw: random.Random) -> list[Any]:
    found: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        toggle(model, draw)
        loss = model(batch(step)).square().mean()
        toggle(model, draw)
        loss.backward()
        toggle(model, draw)
        if draw.random() < 0.3:
            model(batch(step)).sin().mean().backward()
        if draw.random() < 0.7:
            optimizer.step()
            toggle(model, draw)
            optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*found, *model.parameters()]


def cleared(model: Net, draw: random.Random) -> list[Any]:
    """``zero_grad`` in a forward, and in a hook before it; with gradients of whole and of accumulated steps."""
    found: list[Any] = []
    for step in range(4):
        how = draw.choice([True, False, None])
        model.inside = None if how is None else functools.partial(Net.zero_grad, set_to_none=how)
        handle = model.register_forward_pre_hook(lambda *_: model.head.zero_grad())
        model(batch(step)).square().mean().backward()
        handle.remove()
        model(batch(step + 9)).square().mean().backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found


def used_inside(model: Net, draw: random.Random) -> list[Any]:
    """Gradients that a forward reads, drops, replaces and writes to."""
    found: list[Any] = []

    def act(model: Net) -> None:
        how = draw.choice(["read", "drop", "drop one", "replace", "write", "norm", "global"])
        if how.startswith("drop"):
            for parameter in [model.head.weight] if how == "drop one" else model.parameters():
                parameter.grad = None
        given = [p for p in model.parameters() if p.grad is not None]
        if how == "read":
            found.extend(p.grad.clone() for p in given)
        elif how == "norm":
            found.append(sum(p.grad.norm() for p in given))
        elif how == "global":
            model.head.weight.grad = torch.full((4, 6), 0.25, dtype=torch.float64)
        for parameter in given if how in ("replace", "write") else ():
            if how == "write":
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5

    model.inside = act
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(batch(step)).square().mean().backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if draw.random() < 0.5:
            optimizer.step()
    return [*found, *model.parameters()]


def loaded_inside(model: Net, draw: random.Random) -> list[Any]:
    """State dicts that are loaded before, and loaded and read in, a forward."""
    torch.manual_seed(1)
    other = Net().double()
    found: list[Any] = []
    model.load_state_dict(other.state_dict())

    def act(model: Net) -> None:
        model.head.load_state_dict({name: x * 0.5 for name, x in other.head.state_dict().items()})
        found.extend(x.detach().clone() for x in model.head.state_dict().values())

    model.inside = act
    model(batch(0)).square().mean().backward()
    return [*found, *(p.grad for p in model.parameters()), *model.parameters()]


USES: dict[str, Callable[[Net, random.Random], list[Any]]] = {
    "toggled": toggled,
    "cleared": cleared,
    "used_inside": used_inside,
    "loaded_inside": loaded_inside,
}


def same(kind: str, use: str, seed: int) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp" if kind == "tp" else "dp",))
    expected = USES[use](drawn(), random.Random(seed))
    try:
        found = USES[use](sharded(kind, mesh), random.Random(seed))
    except StaticStepError:  # the recorded step had frozen parameters in its backward
        assert kind == "static"
        return
    whole = whole_tensors({index: None if x is None else x.detach() for index, x in enumerate(found)})
    for index, (value, one) in enumerate(zip(whole.values(), expected, strict=True)):
        assert (value is None) == (one is None), f"{index}: {value} for {one}"
        if one is not None:
            torch.testing.assert_close(value, one, rtol=1e-9, atol=1e-11, msg=lambda text, i=index: f"{i}: {text}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_equal_to_one_device(ranks: RankPools, kind: str, use: str) -> None:
    """A frozen parameter got gradients on dp; ``fully_shard`` failed in the next forward; gradients were not cleared."""
    seeds = range(200 if NIGHTLY else 10 if use == "toggled" else 3)
    assert ranks.run(run_cases, same, [(kind, use, seed) for seed in seeds], world_size=2) == [len(seeds)] * 2


def refused(kind: str) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model: Any = sharded(kind, mesh)
    one, other = model.first.up.weight, model.second.up.weight
    with pytest.raises(SetDataError, match=r"another parameter's own memory.*other\.data\.clone"):
        one.data, other.data = other.data, one.data
    with pytest.raises(ForeignToolError, match=r"would be swapped.*a\.data, b\.data = b\.data\.clone"):
        torch.utils.swap_tensors(one, other)
    for ask in (
        torch.autograd.graph.get_gradient_edge,
        lambda p: torch.autograd.graph.register_multi_grad_hook([p], print),
    ):
        with pytest.raises(UnsupportedParameterError, match=r"weight' .* no graph has it"):
            ask(one)
    model.inside = lambda model: optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(batch(0)).square().mean()  # there are no gradients
    loss.backward()
    with pytest.raises(FullyShardStateError, match=r"inside of the forward that uses it.*optimizer\.step"):
        model(batch(0))
    model.inside = None
    model.zero_grad()
    model.load_state_dict(drawn().state_dict())
    reference: Any = drawn()
    for each in (reference, model):
        one, other = each.first.up.weight, each.second.up.weight
        one.data, other.data = other.data.clone(), one.data.clone()
        each(batch(0)).square().mean().backward()
    whole = whole_tensors({name: p.grad for name, p in model.named_parameters()})
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad)


@pytest.mark.parametrize("kind", ["units", "modules"])
def test_what_cannot_be_shared_is_refused(ranks: RankPools, kind: str) -> None:
    """Each was silent: one parameter had the values of both, and the hook did not run."""
    ranks.run(refused, kind, world_size=2)


def hooked_nodes(kind: str, after: bool) -> None:
    """The node of a parameter in a graph, as optimizers and wrappers of gradients find it."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp" if kind == "tp" else "dp",))
    models: list[Any] = [drawn(), sharded(kind, mesh)]
    for model in models:
        model(batch(0)).square().mean().backward()
        weight = model.head.weight
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        handle = (
            node.register_hook(lambda *_: None)
            if after
            else node.register_prehook(lambda g: (g[0].clamp(-0.01, 0.01),))
        )
        loss = model(batch(1)).square().mean()
        if model is models[1] and (after or kind in ("units", "modules")):
            with pytest.raises(UnsupportedParameterError, match=r"AccumulateGrad node of .*head.weight.*register_"):
                loss.backward()
            handle.remove()
            model.zero_grad()
            return
        loss.backward()
    whole = whole_tensors({name: p.grad for name, p in models[1].named_parameters()})
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad)


def test_hooks_of_nodes(ranks: RankPools) -> None:
    """They ran without the complete gradient, or never, silently."""
    cases = [(kind, after) for kind in ("dp", "tp", "units", "modules") for after in (False, True)]
    ranks.run(run_cases, hooked_nodes, cases, world_size=2)


def read_whole() -> None:
    """Ops for which DTensor has no rule, of parameters that are parts of buffers; the compiler meets their gradients."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    models: list[Any] = [drawn(), sharded("modules", mesh)]
    found: list[dict[str, Any]] = []
    for model in models:
        weight, bias = model.head.weight.detach(), model.head.bias.detach()
        read = [torch.nonzero(weight > 0), torch.unique(weight.round(decimals=1)), weight[weight > 0]]
        read += [torch.bincount((bias.abs() * 10).long()), torch.linspace(bias.min(), bias.max(), 5)]
        model.first.compile(backend="eager")
        for step in range(2):
            torch._dynamo.reset()
            model(batch(step)).square().mean().backward()
        found.append({str(i): x for i, x in enumerate([*read, *(p.grad for p in model.parameters())])})
    whole = whole_tensors(found[1])
    for name, value in found[0].items():
        torch.testing.assert_close(whole[name], value)


def test_ops_without_a_rule_and_compiled_forwards(ranks: RankPools) -> None:
    """PyTorch's error that sharding propagation failed, and, in 2.13, an assertion of the compiler."""
    ranks.run(read_whole, world_size=2)
