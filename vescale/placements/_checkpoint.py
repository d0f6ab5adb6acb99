"""DTensors with our placements in checkpoints: which blocks of the global tensor a rank writes and reads.

A rank's part is several N-D blocks of the global tensor (``Region.boxes``), where stock DTensor has one. Each becomes a
DCP chunk of its own, named by its global offset; replicas name the same chunks, of which DCP writes one. Reading and
writing go through views of the local tensor: nothing of global size is allocated, and a local tensor that is part of a
larger buffer is filled in place.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from vescale.compat import AsyncCollectiveTensor, CheckpointHooks, local_of, make_dtensor, make_spec, note, spec_of
from vescale.errors import ShardedStateError
from vescale.placements._pieced_shards import FlattenedShard, InterleavedShard
from vescale.placements._placement_kinds import is_sharded
from vescale.placements._ragged import RaggedShard, StridedRaggedShard, rebuild_strided
from vescale.placements._region import Box, Region, local_region, own_region


def write_items(fqn: str, dtensor: DTensor) -> list[WriteItem]:
    """One DCP write item for each block of this rank's part; none on a rank that holds nothing.

    Raises ValueError for a pending reduction, or a local tensor that the placements do not describe.
    """
    _refuse_partial(fqn, dtensor)
    region = _own_region(dtensor)
    _checked_local(fqn, dtensor, region)
    return _items(fqn, dtensor, _saved_boxes(region))


def metadata_items(fqn: str, dtensor: DTensor) -> list[WriteItem]:
    """The write items of all ranks together, each block once; pure arithmetic, the same on every rank."""
    _refuse_partial(fqn, dtensor)
    mesh_shape, placements = tuple(spec_of(dtensor).mesh.shape), dtensor.placements
    owners = [range(size) if is_sharded(p) else (0,) for size, p in zip(mesh_shape, placements)]
    boxes = {  # a tensor without elements has the same empty block everywhere
        box.offset: box
        for coordinate in itertools.product(*owners)
        for box in _saved_boxes(local_region(dtensor.shape, placements, mesh_shape, coordinate))
    }
    return _items(fqn, dtensor, list(boxes.values()))


def chunk_list(dtensor: DTensor) -> list[ChunkStorageMetadata]:
    """The blocks that this rank reads; none where it holds nothing. Raises ValueError for a pending reduction."""
    _refuse_partial(None, dtensor)
    return [_chunk(box) for box in _own_region(dtensor).boxes]


def tensor_shard(dtensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The block at ``index.offset`` as a view of the local tensor: reading into it fills the DTensor in place.

    Raises:
        ValueError: this rank has no block at that offset, or a local tensor that the placements do not describe.
    """
    region = _own_region(dtensor)
    local = _checked_local(index.fqn, dtensor, region)
    offset = tuple(index.offset) if index.offset is not None else None
    for box in _saved_boxes(region):
        if box.offset == offset:
            return box.view(local) if region.numel else local.reshape(box.sizes)
    raise ShardedStateError(
        f"{index.fqn}: no block of this rank starts at {offset}; a DTensor of shape {tuple(dtensor.shape)} placed as "
        f"{dtensor.placements} has blocks at {[box.offset for box in _saved_boxes(region)]} on this rank; plan and "
        "transfer the same DTensor, without redistributing it in between"
    )


def check_load(fqn: str, dtensor: DTensor, saved: Any) -> None:
    """Raise ValueError when the checkpoint's entry cannot be loaded into the DTensor."""
    _refuse_partial(fqn, dtensor)
    if not isinstance(saved, TensorStorageMetadata):
        raise ShardedStateError(
            f"{fqn}: the checkpoint holds an object that is not a tensor, but the state dict has a DTensor of shape "
            f"{tuple(dtensor.shape)} placed as {dtensor.placements}; load into the kind of value that was saved"
        )
    if tuple(saved.size) != tuple(dtensor.shape):
        raise ShardedStateError(
            f"{fqn}: the checkpoint holds a tensor of global shape {tuple(saved.size)} in {len(saved.chunks)} chunks, "
            f"but the state dict has a DTensor of global shape {tuple(dtensor.shape)} placed as {dtensor.placements}; "
            "placements and meshes may differ between save and load, global shapes may not: build the model with the "
            f"sizes it was saved with, or leave {fqn} out of the state dict"
        )
    if spec_of(dtensor).mesh.get_coordinate() is not None:
        _checked_local(fqn, dtensor, _own_region(dtensor))


def check_full(fqn: str, dtensor: DTensor, full: Any) -> None:
    """Raise ValueError when a full value cannot become the DTensor; no communication."""
    _refuse_partial(fqn, dtensor)
    if not isinstance(full, torch.Tensor) or full.shape != dtensor.shape:
        found = f"shape {tuple(full.shape)}" if isinstance(full, torch.Tensor) else f"type {type(full).__name__}"
        raise ShardedStateError(
            f"{fqn}: the full state dict holds a value of {found}, but the model or optimizer has a DTensor of global "
            f"shape {tuple(dtensor.shape)} placed as {dtensor.placements}; pass the full tensor of that shape, or "
            f"remove {fqn} and load with strict=False"
        )


def fill(fqn: str, dtensor: DTensor, full: torch.Tensor) -> DTensor:
    """The DTensor with this rank's part of ``full``, which this rank holds whole; no communication.

    Filled in place and returned; a DTensor on the meta device is replaced by a new one on its mesh's device, of the dtype
    of ``full``. Raises ValueError for another global shape.
    """
    check_full(fqn, dtensor, full)
    spec = spec_of(dtensor)
    region = own_region(dtensor.shape, spec.placements, spec.mesh)
    filled = dtensor
    if dtensor.is_meta:
        local = full.new_empty(region.local_shape if region is not None else 0, device=spec.mesh.device_type)
        new_spec = make_spec(spec.mesh, spec.placements, dtensor.shape, dtensor.stride(), full.dtype)
        filled = make_dtensor(local, new_spec)
    if region is not None:
        local = _checked_local(fqn, filled, region)
        with torch.no_grad():
            for box in region.boxes:
                block = tuple(slice(start, start + size) for start, size in zip(box.offset, box.sizes))
                box.view(local).copy_(full[block])
    return filled


HOOKS = CheckpointHooks(
    write_items=write_items,
    chunk_list=chunk_list,
    tensor_shard=tensor_shard,
    metadata_items=metadata_items,
    check_load=check_load,
    check_full=check_full,
    fill=fill,
)


def _own_region(dtensor: DTensor) -> Region:
    region = own_region(dtensor.shape, dtensor.placements, spec_of(dtensor).mesh)
    assert region is not None, "DCP plans a DTensor only on the ranks of its mesh"
    return region


def _saved_boxes(region: Region) -> Sequence[Box]:
    """What a rank with this region writes: its blocks. A tensor without elements has one empty block on every rank, so
    that the checkpoint knows its name."""
    if math.prod(region.global_shape) == 0:
        return [Box((0,) * len(region.global_shape), region.global_shape, (0,) * len(region.global_shape), None)]
    return region.boxes


def _checked_local(fqn: str, dtensor: DTensor, region: Region) -> torch.Tensor:
    """The local tensor, once it is there; a view by blocks must not reach beyond it into a buffer that it is part of."""
    local = local_of(dtensor)
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if tuple(local.shape) != region.local_shape:
        raise ShardedStateError(
            f"{fqn}: a DTensor of shape {tuple(dtensor.shape)} placed as {dtensor.placements} has a local tensor of "
            f"shape {region.local_shape} on this rank, but the one found has shape {tuple(local.shape)}; build it with "
            "distribute_tensor or from_local, which check this"
        )
    return local


def _items(fqn: str, dtensor: DTensor, boxes: Sequence[Box]) -> list[WriteItem]:
    properties = dataclasses.replace(
        TensorProperties.create_from_tensor(local_of(dtensor)), requires_grad=dtensor.requires_grad
    )
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=dtensor.shape),
        )
        for box in boxes
    ]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.sizes))


def _refuse_partial(fqn: str | None, dtensor: DTensor) -> None:
    if any(placement.is_partial() for placement in dtensor.placements):
        raise ShardedStateError(
            f"{fqn or 'a DTensor'}: shape {tuple(dtensor.shape)} placed as {dtensor.placements} has a pending reduction, "
            "and a checkpoint holds values only; redistribute it to a placement without Partial first"
        )


# Our placements in files: what ``torch.load(weights_only=True)`` may rebuild.


def allow_safe_load() -> None:
    """Let ``torch.load(weights_only=True)`` build our placements, as PyTorch does for its own; nothing else changes.

    Called on import, so that a process that has made no placement yet can load one. Each constructor validates its
    arguments, whatever a file contains.
    """
    ours: list[Any] = [RaggedShard, StridedRaggedShard, InterleavedShard, FlattenedShard, rebuild_strided]
    note("placements._checkpoint:torch", *ours)
    torch.serialization.add_safe_globals(ours)
