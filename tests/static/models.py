"""Small models on a mesh of one axis, in both modes, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from vescale import Plan, parallelize
from vescale.static import report

__all__ = ["Mlp", "both", "compare", "mesh_of", "same", "tp_plan"]


class Mlp(nn.Module):
    """Two layers with heads between them: ``up`` is cut by columns, ``down`` by rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        rows, length, width = h.shape
        h = h.view(rows, length, 4, width // 4).transpose(1, 2)
        h = torch.relu(h) * 2
        h = h.transpose(1, 2).reshape(rows, length, width)
        return x + self.down(h)


def mesh_of(size: int = 2) -> DeviceMesh:
    return init_device_mesh(device_type(), (size,), mesh_dim_names=("tp",))


def tp_plan(mesh: DeviceMesh, mlp: str = r"(.*\.)?mlp") -> Plan:
    plan = Plan(mesh)
    plan.shard(rf"{mlp}.up.(weight|bias)", Shard(0))
    plan.shard(rf"{mlp}.up.<in>", Replicate())
    plan.shard(rf"{mlp}.down.weight", Shard(1))
    plan.shard(rf"{mlp}.down.<out>", Replicate())
    return plan


def both(
    build: Callable[[], nn.Module],
    plan: Callable[[DeviceMesh], Plan] = tp_plan,
    sizes: dict[str, int] | None = None,
) -> tuple[nn.Module, nn.Module]:
    """The same model in eager and in static mode; ``sizes``: of the mesh, by axis."""
    sizes = sizes or {"tp": 2}
    mesh = init_device_mesh(device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    made = []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        made.append(parallelize(build(), plan(mesh), mode=mode))
    return made[0], made[1]


def compare(models: tuple[nn.Module, nn.Module], *inputs: Any, backward: bool = True, seed: int = 0) -> Any:
    """One step of both; raises AssertionError where a bit differs. Returns the output in static mode."""
    outputs = []
    for model in models:
        model.zero_grad()
        torch.manual_seed(seed)
        out = model(*inputs)
        if backward:
            (out if out.ndim == 0 else out.square().mean()).backward()
        outputs.append(out)
    assert same(*outputs), outputs
    for (name, p), (_, q) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert same(p.grad, q.grad), f"the gradient of {name} differs; {report(models[1])}"
    return outputs[1]


def same(a: Any, b: Any) -> bool:
    """Whether two tensors have equal bits, and placements."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.placements == b.placements and same(a._local_tensor, b._local_tensor)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    return bool(a == b)
