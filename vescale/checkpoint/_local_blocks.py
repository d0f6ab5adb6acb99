"""The blocks of a global tensor that the calling rank holds, as views of its memory; for tensors in any placement."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from vescale.compat import AsyncCollectiveTensor, local_of, spec_of
from vescale.errors import UnsavableError
from vescale.placements import Box, Region, is_sharded, own_region

Regions = dict[tuple[tuple[int, ...], tuple[Placement, ...], int], tuple[Region | None, tuple[int, ...]]]
"""(shape, placements, ``id`` of a mesh) -> (this rank's region, axes along which ranks hold the same)"""


@dataclass(frozen=True)
class LocalBlocks:
    """A rank's part of a tensor.

    Attributes:
        tensor: as the user has it.
        shape: global.
        boxes: disjoint blocks, in local order; none where the rank holds nothing.
        local: the rank's memory; None on a rank outside of the mesh.
        mesh: None for a plain tensor, which every rank holds whole.
        repeated: axes of the mesh along which ranks hold the same blocks.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local: torch.Tensor | None
    mesh: DeviceMesh | None = None
    repeated: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize

    def view(self, box: Box) -> torch.Tensor:
        """The block's elements; writing to them writes to the tensor."""
        assert self.local is not None
        return box.view(self.local)


def local_blocks(name: str, tensor: torch.Tensor, regions: Regions | None = None) -> LocalBlocks:
    """No communication.

    Args:
        name: for errors.
        regions: those found so far, for the next tensors of equal layout on the same mesh object.

    Raises CheckpointError for pending reductions, tensors without memory, sparse and quantized ones and other tensor
    subclasses, and local tensors that their placements do not describe.
    """
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise UnsavableError(
            f"{name}: a lazy module has not created this tensor yet, so that it has no shape; run a forward first"
        )
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        tensor = tensor.detach()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        _check_memory(name, tensor)
        whole = Box((0,) * len(shape), shape, (0,) * len(shape), None)
        return LocalBlocks(tensor, shape, (whole,) if tensor.numel() else (), tensor)
    spec = spec_of(tensor)
    placements, key = tuple(spec.placements), None
    if regions is not None:
        key = (shape, placements, id(spec.mesh))
        if (known := regions.get(key)) is not None:
            return _of_region(name, tensor, shape, *known)
    if any(placement.is_partial() for placement in placements):
        raise UnsavableError(
            f"{name}: shape {shape} placed as {tuple(spec.placements)} has a pending reduction, and a checkpoint holds "
            "values only; redistribute it to a placement without Partial first"
        )
    region = own_region(shape, placements, spec.mesh)
    repeated = tuple(axis for axis, placement in enumerate(placements) if not is_sharded(placement))
    if regions is not None and key is not None:
        regions[key] = region, repeated
    return _of_region(name, tensor, shape, region, repeated)


def _of_region(
    name: str, tensor: DTensor, shape: tuple[int, ...], region: Region | None, repeated: tuple[int, ...]
) -> LocalBlocks:
    spec = spec_of(tensor)
    if region is None:
        return LocalBlocks(tensor, shape, (), None, spec.mesh, repeated)
    local = local_of(tensor)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = local.detach()
    _check_memory(name, local)
    if tuple(local.shape) != region.local_shape:
        raise UnsavableError(
            f"{name}: a DTensor of shape {shape} placed as {tuple(spec.placements)} has a local tensor of shape "
            f"{region.local_shape} on this rank, but the one found has shape {tuple(local.shape)}; build it with "
            "distribute_tensor or from_local, which check this"
        )
    return LocalBlocks(tensor, shape, region.boxes, local, spec.mesh, repeated)


def _check_memory(name: str, local: torch.Tensor) -> None:
    if local.is_meta:
        raise UnsavableError(
            f"{name}: the tensor of shape {tuple(local.shape)} is on the meta device and has no memory; materialize the "
            "model first (vescale.materialize, or model.to_empty)"
        )
    if local.layout != torch.strided or local.is_quantized:
        raise UnsavableError(f"{name}: its layout is {local.layout}; checkpoints hold dense tensors only")
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and _hides_memory(local):
        raise UnsavableError(
            f"{name}: a {type(local).__module__}.{type(local).__qualname__} keeps its values in other tensors; save "
            "those tensors, or a dequantized copy, as one of **more"
        )


def _hides_memory(local: torch.Tensor) -> bool:
    """Whether a tensor subclass has no memory of its own (wrappers); others, which only add methods, have."""
    return type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


# Memory for bytes on their way that goes back to the system as soon as nobody has it.


def scratch(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes in the host's memory, not initialized to anything in particular.

    The allocator of C may keep what is freed, once for each thread and size, so that a bound on memory would not hold.
    """
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
