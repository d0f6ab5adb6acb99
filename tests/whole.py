"""The whole tensors of many DTensors with one collective; ``full_tensor`` of each takes a millisecond or more."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from tests.device import device_type

__all__ = ["whole", "whole_tensors"]

Name = TypeVar("Name")
_Key = tuple[DeviceMesh, tuple[Placement, ...], torch.Size]
# Simulated ranks are threads, and each must find what the others find.
_KNOWN = threading.local()


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Mapping[Name, torch.Tensor | None]) -> dict[Name, torch.Tensor | None]:
    """``tensors`` with the whole tensor, detached, in place of each DTensor; what is not a DTensor is returned as it is.

    All ranks must call this with the same names. Raises AssertionError if replicas differ in any bit, which
    ``full_tensor`` would not notice.
    """
    found: dict[Name, torch.Tensor | None] = {}
    packed: dict[Name, DTensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if isinstance(tensor, DTensor):
            if _is_packed(tensor):
                packed[name] = tensor
            else:
                found[name] = tensor.detach().full_tensor()
    if not packed:
        return found
    keys = {name: (tensor.device_mesh, tensor.placements, tensor.shape) for name, tensor in packed.items()}
    positions = _positions(keys.values())
    with torch.no_grad():
        bits = [x.to_local().contiguous().flatten().view(torch.uint8).to(device_type()) for x in packed.values()]
    sizes = [
        sum(len(positions[key][rank]) * packed[name].dtype.itemsize for name, key in keys.items())
        for rank in range(dist.get_world_size())
    ]
    pieces = _gather(torch.cat(bits), sizes)
    begin = [0] * len(pieces)
    for name, tensor in packed.items():
        width = tensor.dtype.itemsize
        joined = torch.empty(tensor.numel(), width, dtype=torch.uint8)
        parts = []
        for rank, where in enumerate(positions[keys[name]]):
            parts.append((where, pieces[rank][begin[rank] :][: len(where) * width].view(-1, width)))
            begin[rank] += len(where) * width
            joined[where] = parts[-1][1]
        if sum(len(where) for where, _ in parts) > tensor.numel():
            assert all(torch.equal(joined[where], part) for where, part in parts), f"replicas of {name} differ"
        found[name] = joined.flatten().view(tensor.dtype).view(tensor.shape)
    return found


def _is_packed(tensor: DTensor) -> bool:
    """Whether all ranks have a part of the values themselves, as plain memory."""
    return (
        tensor.device_mesh.size() == dist.get_world_size()
        and not any(placement.is_partial() for placement in tensor.placements)
        and type(tensor.detach().to_local()) is torch.Tensor
    )


def _positions(keys: Iterable[_Key]) -> dict[_Key, list[torch.Tensor]]:
    """Which elements of the whole tensor each rank has, in the order of its local tensor."""
    known: dict[_Key, list[torch.Tensor]] = vars(_KNOWN).setdefault("positions", {})
    new = [key for key in dict.fromkeys(keys) if key not in known]
    if new:
        mine = []
        for mesh, placements, shape in new:
            numbers = DTensor.from_local(torch.arange(shape.numel()).view(shape), mesh, [Replicate()] * mesh.ndim)
            mine.append(numbers.redistribute(mesh, placements).to_local().flatten())
        counts = torch.tensor([len(numbers) for numbers in mine])
        rows = [row.tolist() for row in _gather(counts, [len(mine)] * dist.get_world_size())]
        gathered = _gather(torch.cat(mine), [sum(row) for row in rows])
        of_ranks = [numbers.split(row) for numbers, row in zip(gathered, rows, strict=True)]
        for i, key in enumerate(new):
            known[key] = [numbers[i] for numbers in of_ranks]
            assert torch.cat(known[key]).unique().numel() == key[2].numel(), key
    return known


def _gather(mine: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """The 1-dim tensors of all ranks, of these sizes."""
    longest = max(sizes)
    padded = torch.zeros(longest, dtype=mine.dtype)
    padded[: len(mine)] = mine
    gathered = torch.empty(len(sizes) * longest, dtype=mine.dtype)
    dist.all_gather_into_tensor(gathered, padded)
    return [gathered[i * longest :][:size] for i, size in enumerate(sizes)]
