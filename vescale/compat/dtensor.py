"""DTensor internals under stable names.

Everything here is private in PyTorch; the file each name comes from is in the import. A name that a torch version moved
or dropped fails in :func:`vescale.compat.self_check`, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial as MaskPartial
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from vescale.compat.sharding_caches import MADE_SPECS, make_room

_ORDERED = (Replicate, Shard, StridedShard, Partial, MaskPartial)
"""The placements from which PyTorch derives an order of axes."""


def spec_of(dtensor: DTensor) -> DTensorSpec:
    return dtensor._spec


def local_of(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself: no autograd node, no copy."""
    return dtensor._local_tensor


def own_part(value: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, of this rank's part of a DTensor; None for a tensor without."""
    local = own_part(tensor)
    try:
        return local.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse and other subclasses have none, and say so with either
        return None


def versions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Numbers that change with every write to a tensor that autograd knows of: its version, and that of its local tensor."""
    known = (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,)
    return tuple(0 if one.is_inference() else one._version for one in known)


def set_local(dtensor: DTensor, local: torch.Tensor) -> None:
    """Put another local tensor, of the same shape and dtype, in place; the DTensor object stays the same."""
    dtensor._local_tensor = local


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """A spec; equal calls get one object, which must not be changed (PyTorch shares specs, too)."""
    key = (id(mesh), tuple(placements), tuple(shape), tuple(stride), dtype)
    try:
        made = MADE_SPECS.get(key)
    except TypeError:  # symbolic sizes have no hash
        return DTensorSpec(mesh, key[1], tensor_meta=TensorMeta(torch.Size(shape), key[3], dtype))
    if made is None:
        made = DTensorSpec(mesh, key[1], tensor_meta=TensorMeta(torch.Size(shape), key[3], dtype))
        if (
            made.use_strided_shard_as_shard_order
        ):  # PyTorch changes that flag of specs that it meets: these are not shared
            return (
                made if _is_order(mesh, key[1]) else spec_of_result(mesh, key[1], made.tensor_meta, (), is_order=False)
            )
        make_room(MADE_SPECS)
        MADE_SPECS[key] = made
    return made


def _is_order(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Whether strided shards say in which order the axes have cut a dim. Others are of dims that a view has flattened, or
    stand beside placements for which PyTorch has no order, which it refuses to look at."""
    if not all(isinstance(placement, _ORDERED) for placement in placements):
        return False
    return DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh) is not None


def write_counts(dtensors: Sequence[DTensor]) -> list[int]:
    """A number for each that changes when it is written to: ops count on the DTensor, or on its local tensor, or on both."""
    return [x._version + x._local_tensor._version for x in dtensors]


def spec_of_result(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    meta: TensorMeta | None,
    operands: Sequence[DTensorSpec],
    *,
    is_order: bool | None = None,
) -> DTensorSpec:
    """A spec whose strided shards stand for what they do in the operands, for an order of axes or for a view: to PyTorch,
    specs that differ in that are different, and it gathers both. ``is_order``: what they stand for; None: as the operands
    say, or PyTorch's default."""
    flag = is_order
    if flag is None and any(isinstance(placement, StridedShard) for placement in placements):
        strided = (s for s in operands if any(isinstance(placement, StridedShard) for placement in s.placements))
        flag = next((s.use_strided_shard_as_shard_order for s in strided), None)
    return DTensorSpec(mesh, placements, tensor_meta=meta, use_strided_shard_as_shard_order=flag)


def make_dtensor(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
    """A DTensor around a local tensor; no check, no communication, no autograd link."""
    # DTensor's __init__ does nothing, behind two wrappers that cost more than the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def replace_parts(x: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Let ``x`` be what ``local`` is a part of by ``spec``, of the same shape."""
    x._local_tensor, x._spec = local, spec


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``; RuntimeError outside of any."""
    return _mesh_resources.get_current_mesh()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from; itself when from none."""
    return mesh._get_root_mesh()


def rank_in_mesh(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def partial_reduce(partial: Placement, local: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """The reduced value of a Partial axis, by the placement's own rule (one all-reduce on the axis)."""
    reduced = partial._reduce_value(local, mesh, axis)  # type: ignore[attr-defined]
    return reduced.wait() if hasattr(reduced, "wait") else reduced


def expanded_as(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """``part``, a shard of ``whole``, with the strides of ``whole``: 0 for dims that are expanded, the others in the same
    order. Strides determine the strides of results and the order of sums."""
    if whole.ndim != part.ndim:
        return part
    is_expanded = [size > 1 and stride == 0 for size, stride in zip(whole.shape, whole.stride())]
    if not any(is_expanded):
        return part
    order = sorted(range(part.ndim), key=lambda dim: whole.stride()[dim], reverse=True)
    sizes = [min(size, 1) if expands else size for expands, size in zip(is_expanded, part.shape)]
    once = part.as_strided(sizes, part.stride()).permute(order).contiguous()
    return once.permute([order.index(dim) for dim in range(part.ndim)]).expand(part.shape)


def keep_memory(dtensor: torch.Tensor) -> None:
    """Let ``dtensor.data = values`` write to the local tensor, a part of a buffer, instead of taking another one. No other
    DTensor that keeps its memory is given memory of that buffer, either. Called again with each new local tensor."""
    dtensor.__dict__["_keeps_memory"] = True
    storage = storage_of(dtensor)
    if storage is not None:
        setattr(storage, _IS_KEPT, True)


def keeps_memory(dtensor: torch.Tensor) -> bool:
    return "_keeps_memory" in dtensor.__dict__


def is_in_kept_memory(dtensor: torch.Tensor) -> bool:
    """Whether the local tensor is a part of a buffer of tensors that keep their memory."""
    return hasattr(storage_of(dtensor), _IS_KEPT)


_IS_KEPT = "_vescale_is_kept"
