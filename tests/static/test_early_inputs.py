"""Plain inputs become local tensors at once, where inputs like them have been seen; all else is as with DTensors."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankPools
from tests.static.models import Mlp, both, compare, tp_plan
from vescale import Plan
from vescale.compat import native_static
from vescale.static import report

pytestmark = pytest.mark.helper("dispatch")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[1] == 7:  # not recorded
            x = x * 3
        h = self.mlp(x) * scale
        return h if mask is None else h * mask


def rows(mesh: DeviceMesh) -> Plan:
    return tp_plan(mesh).shard("<in>", {"tp": Shard(0)})


def batch(step: int, length: int = 5) -> torch.Tensor:
    return torch.randn(4, length, 8, generator=torch.Generator().manual_seed(step))


def num_entered(model: nn.Module) -> int:
    """How many kinds of inputs become local tensors at once."""
    return len(model.forward._early._entries)


def steps(plan: Any) -> Any:
    models = both(Scaled, plan)
    static = models[1]
    mask = (batch(9) > 0).float()
    for step in range(3):
        compare(models, batch(step))
        assert num_entered(static) == min(step, 1)
    for step in range(3):  # other numbers, names and shapes
        compare(models, batch(step), 0.5)
        compare(models, batch(step, 4), 0.5)
        compare(models, batch(step), 2.0, mask)
    seen = num_entered(static)
    assert seen >= 3 and static.forward.static_steps > seen
    given = batch(3)
    before = given._version
    compare(models, given)
    assert given._version == before and type(given) is torch.Tensor
    compare(models, batch(4).requires_grad_())  # its gradient is the caller's
    inference = copy.deepcopy(models[0]), copy.deepcopy(static)
    for step in range(4):
        compare(inference, batch(step))
        with torch.no_grad():
            compare(models, batch(step), backward=False)
    return report(static)


def falls_back() -> Any:
    """A step with inputs like those before, which takes another branch at the end, is repeated with DTensors."""
    models = both(Branching, rows)
    for step in range(3):
        compare(models, batch(step))
    for model in models:
        model.mode.event.set()
    x = batch(4)
    compare(models, x)
    for model in models:
        model.mode.event.clear()
    for step in range(3):
        compare(models, batch(step))
    return report(models[1])


class Branching(Scaled):
    mode: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["mode"] = Mode()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mlp(x)
        return h * 2 if self.mode.has_any() else h


class Mode:
    """Which no guard looks into."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def has_any(self) -> bool:
        return self.event.is_set()


def hooks_get_dtensors() -> None:
    models = both(Scaled, rows)
    for step in range(3):
        compare(models, batch(step))
    kinds: list[type] = []

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        kinds.append(type(args[0]))

    handle = models[1].register_forward_pre_hook(look)
    for step in range(3):
        compare(models, batch(step))
    handle.remove()
    assert kinds == [DTensor] * 3
    compare(models, batch(7))


@pytest.mark.parametrize("plan", [tp_plan, rows])
def test_early_inputs(ranks: RankPools, plan: Any) -> None:
    for found in ranks.run(steps, plan, world_size=2):
        assert found.static_steps >= 10, found


def test_steps_that_fall_back(ranks: RankPools) -> None:
    for found in ranks.run(falls_back, world_size=2):
        assert [fallback.steps for fallback in found.fallbacks] == [1], found
        assert "was not recorded" in str(found), found


def test_hooks_of_users(ranks: RankPools) -> None:
    ranks.run(hooks_get_dtensors, world_size=2)


def test_keys() -> None:
    """Inputs that differ in what decides about a program have different keys; their numbers do not count."""
    key = native_static().inputs_key
    x = torch.zeros(2, 3)
    inputs: list[Any] = [
        (x,), (x, x), (x.T,), (x.double(),), (x.to("meta"),), (x, 2),
        (1,), (1.0,), (True,), (None,), ("1",), ("11",), ("1", "1"),
    ]  # fmt: skip
    keys = [key(args, {}) for args in inputs] + [key((), {"x": x}), key((), {"y": x}), key((x,), {"x": 1})]
    with torch.no_grad():
        keys.append(key((x,), {}))
    with torch.autocast("cpu"):
        keys.append(key((x,), {}))
    assert None not in keys and len(set(keys)) == len(keys)
    assert key((torch.ones(2, 3),), {}) == keys[0]
    others = (x, [x]), (x.requires_grad_(),), (nn.Parameter(x),), (x.detach().to_sparse(),), (2**70,), ("\ud800",)
    assert all(key(args, {}) is None for args in others)
    with torch.inference_mode():
        assert key((torch.zeros(2),), {}) is None
