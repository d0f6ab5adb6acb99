"""``parameter.data = values`` against one device: optimizers written by hand, clipped weights, averages that take turns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPools
from tests.whole import whole
from vescale import (
    parallelize,
    static,  # noqa: F401  (a mode of parallelize)
)
from vescale.errors import SetDataError
from vescale.placements import RaggedShard
from vescale.plans import INIT, RUN, Plan

WIDTH = 6
R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def by_hand(model: nn.Module, step: int, kept: dict[str, Any]) -> None:
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad  # type: ignore[operator]


def clipped(model: nn.Module, step: int, kept: dict[str, Any]) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)
    model.scale.data = model.scale.data * 1.5


def averaged(model: nn.Module, step: int, kept: dict[str, Any]) -> None:
    """Averages take the place of the weights for a forward, and the weights come back."""
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for name, p in model.named_parameters():
        kept[f"average {name}"] = kept.get(f"average {name}", p.data.clone() * 0) * 0.5 + p.data * 0.5
    before = {name: p.data if kept["takes memory"] else p.data.clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = kept[f"average {name}"]
    with torch.no_grad():
        kept[f"seen {step}"] = whole(model(x))
    for name, p in model.named_parameters():
        p.data = before[name]
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.1 * p.grad)  # type: ignore[operator]


def transposed(model: nn.Module, step: int, kept: dict[str, Any]) -> None:
    """Values that are placed elsewhere."""
    for p in (model.up.weight, model.down.weight):
        p.data = (p.data.t() * 0.5).t()
    model.up.weight.data = model.down.weight.data.t() * 2


USES: dict[str, Callable[..., None]] = {f.__name__: f for f in (by_hand, clipped, averaged, transposed)}
PLANS = ("tp", "units", "dp")


def plan_of(kind: str, mesh: Any) -> Plan:
    plan = Plan(mesh)
    if kind == "tp":
        plan.shard("up.weight", S0).shard("up.bias", S0).shard("down.weight", S1).shard("down.<out>", R)
    else:
        plan.shard("<in>", S0)
    if kind == "units":
        plan.shard("(up|down).*", RaggedShard(), phase=INIT).shard("(up|down).*", R, phase=RUN)
    return plan


def trained(model: nn.Module, use: Callable[..., None], kept: dict[str, Any]) -> list[torch.Tensor]:
    for step in range(4):
        x = torch.linspace(-1, 1 + step, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
        model.zero_grad()
        model(x).square().mean().backward()
        use(model, step, kept)
    seen = [value for name, value in kept.items() if name.startswith("seen")]
    return [*(whole(p.detach()) for p in model.parameters()), *(whole(b) for b in model.buffers()), *seen]


def same(kind: str, mode: str) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    drawn = Net().double()
    for name, use in USES.items():
        if kind == "units" and name == "transposed":
            continue
        # What p.data was before is the memory of the unit's buffer.
        takes_memory = {"takes memory": kind != "units"}
        one, model = copy.deepcopy(drawn), copy.deepcopy(drawn)
        parallelize(model, plan_of(kind, mesh), mode=mode)
        expected, found = trained(one, use, dict(takes_memory)), trained(model, use, dict(takes_memory))
        for index, (a, b) in enumerate(zip(expected, found, strict=True)):
            torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-12, msg=lambda m, n=name, i=index: f"{n} {i}: {m}")


@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.helper("dispatch"))])
@pytest.mark.parametrize("kind", PLANS)
def test_equal_to_one_device(ranks: RankPools, kind: str, mode: str) -> None:
    """PyTorch's setter left the numbers of a DTensor: by hand, nothing was trained."""
    ranks.run(same, kind, mode, world_size=2)


def refused() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = parallelize(Net().double(), plan_of("units", mesh))
    weight: Any = model.up.weight
    with pytest.raises(SetDataError, match="part of the buffer of its unit"):
        weight.data = weight.data.float()
    for _ in range(2):
        before = weight.data
        weight.data = before  # its own memory, to which nothing has been assigned since
    weight.data = before * 2
    with pytest.raises(SetDataError, match="Keep a copy"):
        weight.data = before
    weight.data = weight.data.view(2 * WIDTH, WIDTH)  # its own memory
    weight.data = weight
    average = copy.deepcopy(model)
    for value in (average.up.weight.data, average.up.weight, average.up.weight.detach()):
        with pytest.raises(SetDataError, match=r"another parameter's own memory.*other\.data\.clone"):
            weight.data = value
    weight.data = average.up.weight.data.clone()
    other = distribute_tensor(
        torch.zeros(2 * WIDTH, WIDTH), init_device_mesh(device_type(), (1, 2)), [R, S0], src_data_rank=None
    )
    tensor: Any = distribute_tensor(torch.zeros(2 * WIDTH, WIDTH), mesh, [S0], src_data_rank=None)
    with pytest.raises(SetDataError, match="expected the same mesh"):
        tensor.data = other
    source = distribute_tensor(torch.ones(2 * WIDTH, WIDTH), mesh, [S0], src_data_rank=None)
    tensor.data = source
    source.mul_(3)  # the same memory
    assert (whole(tensor) == 3).all()
    tensor.data = source[:4]
    assert tensor.shape == (4, WIDTH)
    assert torch.equal(whole(tensor + 1), torch.full((4, WIDTH), 4.0))


def test_memory_and_shapes(ranks: RankPools) -> None:
    ranks.run(refused, world_size=2)
