"""Do all ranks bring the same program and the same model? Asked before anything is placed."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.comm import all_gather_v, asking, axis_group
from vescale.ir import Program
from vescale.plans import PlanError
from vescale.rng import fingerprint, is_deferred

__all__ = ["check_agreement"]


def check_agreement(model: nn.Module, program: Program, mesh: DeviceMesh) -> None:
    """Compare fingerprints over the ranks of the mesh: two small all-gathers, of the same size on every rank.

    Raises:
        PlanError: on every rank, when the programs, the parameters' shapes or their values differ. Values on the meta
            device, and of DTensors, are not compared; of deferred tensors, how they would be computed.
    """
    if mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = "".join(f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}\n" for name, t in tensors)
    texts = (("the lowered plan", program.to_text()), ("names, shapes and dtypes of parameters and buffers", shapes))
    for what, differing in zip((what for what, _ in texts), _differing([_hash(text) for _, text in texts], mesh)):
        if differing:
            raise PlanError(
                f"ranks {differing} and rank {int(mesh.mesh.flatten()[0])} disagree on {what} of this "
                f"{type(model).__name__}; build the same model and the same plan on every rank"
            )
    for (name, tensor), differing in zip(tensors, _differing([_fingerprint(t) for _, t in tensors], mesh)):
        if differing:
            raise PlanError(
                f"{name} of shape {tuple(tensor.shape)} has other values on ranks {differing} than on rank "
                f"{int(mesh.mesh.flatten()[0])}; seed every rank alike before the model is built (torch.manual_seed), or "
                "load the same checkpoint"
            )


def _differing(numbers: list[int], mesh: DeviceMesh) -> list[list[int]]:
    """For each number the ranks that have another one than the mesh's first rank."""
    if not numbers:
        return []
    group = axis_group(mesh, tuple(range(mesh.ndim)))
    own = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    with asking("parallelize: do the ranks agree"):
        rows = all_gather_v(own, [len(numbers)] * group.size, group.group).wait().view(group.size, -1).tolist()
    ranks = [int(mesh.mesh[coordinate]) for coordinate in group.coordinates]
    first = rows[ranks.index(int(mesh.mesh.flatten()[0]))]
    return [[rank for rank, row in zip(ranks, rows) if row[i] != first[i]] for i in range(len(numbers))]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _fingerprint(tensor: torch.Tensor) -> int:
    """A number that changes with any one element; sums of bit patterns, so that it costs one pass."""
    if is_deferred(tensor):
        return fingerprint(tensor)
    if tensor.is_meta or isinstance(tensor, DTensor) or tensor.numel() == 0:
        return 0
    with torch.no_grad():
        width = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
        return int(tensor.detach().contiguous().view(-1).view(width).sum(dtype=torch.int64))
