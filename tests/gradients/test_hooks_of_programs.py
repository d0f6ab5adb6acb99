"""``register_post_accumulate_grad_hook`` on any plan: called once a backward that reaches the parameter on one device, when
the complete gradient is there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale
from tests.device import device_type
from tests.ranks import RankPools
from tests.whole import whole
from vescale import Plan, parallelize
from vescale.plans import INIT, RUN

SIZES = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "dp x tp": {"dp": 2, "tp": 2},
    "units": {"dp": 2},
    "static": {"dp": 2, "tp": 2},
}


class Net(nn.Module):
    """Has a parameter that some steps do not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(6, 10), nn.Linear(10, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(x)))
        return self.side(x) if side else x


def parallel(model: nn.Module, kind: str) -> nn.Module:
    sizes = SIZES[kind]
    plan = Plan(init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    if "dp" in sizes:
        plan.shard("<in:x>", Shard(0), mesh="dp")
    if "tp" in sizes:
        plan.shard("up.(weight|bias)", Shard(0), mesh="tp").shard("down.weight", Shard(1), mesh="tp")
    if kind == "units":
        plan.shard("up.*", Shard(0), mesh="dp", phase=INIT).shard("up.*", Replicate(), mesh="dp", phase=RUN)
    plan.shard("<out>", Replicate(), mesh=tuple(sizes))
    return parallelize(model, plan, mode="static" if kind == "static" else "eager")


def clip(p: torch.Tensor) -> None:
    """Not linear, so that it is another thing for a part of a sum."""
    assert p.grad is not None
    p.grad.clamp_(-1e-2, 1e-2)


def steps(model: nn.Module, program: str) -> list[Any]:
    """What hooks have seen, in whole values, and the parameters afterwards."""
    seen: list[Any] = []
    handles = []
    for name, p in model.named_parameters():
        optimizer = torch.optim.AdamW([p], lr=0.1)

        def hook(q: torch.Tensor, name: str = name, optimizer: Any = optimizer) -> None:
            assert not isinstance(q.grad, DTensor) or not any(s.is_partial() for s in q.grad.placements)
            seen.append((name, whole(q.grad).clone()))
            if program == "clip":
                clip(q)
            if program == "optimizer in backward":
                optimizer.step()
                optimizer.zero_grad()

        handles.append(p.register_post_accumulate_grad_hook(hook))
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    draws = torch.Generator().manual_seed(1)
    for step in range(5):
        x = torch.randn(8, 6, dtype=torch.float64, generator=draws)
        model(x, step % 2 == 0).square().mean().backward()
        if program == "accumulated" and step % 2 == 0:
            continue
        if program == "clip" and step == 3:
            handles.pop(1).remove()
        if program != "optimizer in backward":
            outer.step()
            outer.zero_grad()
    return [*sorted(seen, key=lambda each: each[0]), *((n, whole(p.detach())) for n, p in model.named_parameters())]


def compare(kind: str, program: str) -> None:
    torch.manual_seed(0)
    reference = Net().double()
    model = parallel(copy.deepcopy(reference), kind)
    for (name, found), (wanted, expected) in zip(steps(model, program), steps(reference, program), strict=True):
        assert name == wanted
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("program", ["optimizer in backward", "clip", "accumulated"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.helper("dispatch")] * (kind == "static")) for kind in SIZES]
)
def test_gradients_are_complete_in_hooks(ranks: RankPools, kind: str, program: str) -> None:
    size = 4 if len(SIZES[kind]) == 2 else 2
    ranks.run(compare, kind, program, world_size=size)


def under_no_sync() -> list[int]:
    torch.manual_seed(0)
    model = parallel(Net().double(), "dp")
    calls: list[torch.Tensor] = []
    weight: Any = model.get_parameter("up.weight")
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(whole(p.grad).clone()))
    x, counts = torch.randn(8, 6, dtype=torch.float64), []
    with vescale.no_sync(model):
        model(x, True).sum().backward()
        counts.append(len(calls))
        model(x, True).sum().backward()
        counts.append(len(calls))
    model(x, False).sum().backward()
    counts.append(len(calls))
    assert torch.equal(calls[-1], whole(weight.grad))
    return counts


def test_hooks_wait_for_the_last_backward_of_an_accumulation(ranks: RankPools) -> None:
    assert ranks.run(under_no_sync, world_size=2) == [[0, 0, 1], [0, 0, 1]]


def after_removal() -> list[int]:
    """A reducer that is removed leaves hooks to autograd."""
    model, calls = nn.Linear(3, 3), []
    reducer = vescale.GradientReducer(model, init_device_mesh(device_type(), (2,)))
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    model(torch.ones(2, 3)).sum().backward()
    counts = [len(calls)]
    reducer.remove()
    model(torch.ones(2, 3)).sum().backward()
    counts.append(len(calls))
    handle.remove()
    model(torch.ones(2, 3)).sum().backward()
    return [*counts, len(calls)]


def test_hooks_of_removed_reducers_are_called_by_autograd(ranks: RankPools) -> None:
    assert ranks.run(after_removal, world_size=2) == [[1, 2, 2], [1, 2, 2]]
