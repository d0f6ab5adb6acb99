"""What the scripts of this folder share: a mesh, a small model, its plan, and its inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale import Plan

__all__ = ["Net", "inputs", "plan", "rank", "start"]


def start(**axes: int) -> DeviceMesh:
    """Join the job, seed as a script should, and make a mesh."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def rank() -> int:
    return dist.get_rank()


class Net(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self.down(torch.relu(self.up(self.norm(x)))) * scale
        return out if bias is None else out + bias


def plan(mesh: DeviceMesh, prefix: str = "") -> Plan:
    """Columns and rows over ``tp``; nothing where the mesh has no such axis."""
    result = Plan(mesh)
    if "tp" not in (mesh.mesh_dim_names or ()):
        return result
    result.shard(f"{prefix}up.<in>", Replicate(), mesh="tp").shard(f"{prefix}up.(weight|bias)", Shard(0), mesh="tp")
    result.shard(f"{prefix}down.weight", Shard(1), mesh="tp").shard(f"{prefix}down.<out>", Replicate(), mesh="tp")
    return result


def inputs(seed: int = 0) -> torch.Tensor:
    """Four rows, the same on every rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
