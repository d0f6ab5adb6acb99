"""``distribute_tensor`` for every placement. With stock placements only, it does what its stock namesake does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import current_mesh, make_dtensor, rank_in_mesh, stock
from vescale.errors import DistributeError
from vescale.placements._custom_placement import has_custom
from vescale.placements._dtensor_specs import contiguous_spec
from vescale.placements._local_redistribution import move_local
from vescale.placements._normalized_placements import normalize_placements
from vescale.placements._ragged import RaggedShard

__all__ = ["distribute_tensor"]


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor, as ``torch.distributed.tensor.distribute_tensor`` does, to any placements.

    Args:
        tensor: the global tensor, of the same shape on every rank; a leaf.
        device_mesh: None: the mesh of the surrounding ``with mesh:``.
        placements: one for each mesh axis; None: Replicate. Partial is refused: it has no source.
        src_data_rank: coordinate on each axis whose values count: one exchange an axis, in which the source sends every
            rank its part (a broadcast for Replicate); None: every rank's own values are used and nothing is
            communicated.

    Raises:
        ValueError: placements that do not fit the tensor or the mesh, on every rank before any communication.
        RuntimeError: a tensor that is not a leaf.
    """
    placements = list(placements) if placements is not None else None
    if placements is None or not has_custom(placements):
        return stock().distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    device_mesh = device_mesh or current_mesh()
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes a leaf tensor; the one given has a gradient history: use from_local, or detach it"
        )
    wanted = normalize_placements(placements, tensor.shape, device_mesh)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == wanted:
            return tensor
        raise DistributeError(
            f"distribute_tensor got a DTensor with placements {tensor.placements} for {wanted}; call redistribute"
        )
    if any(placement.is_partial() for placement in wanted):
        raise DistributeError(f"distribute_tensor cannot place as {wanted}: Partial has no source; use from_local")
    spec = contiguous_spec(device_mesh, wanted, tensor.shape, tensor.dtype)
    local = tensor.detach()
    if device_mesh.device_type != local.device.type and not local.is_meta:
        local = local.to(device_mesh.device_type)
    if not rank_in_mesh(device_mesh):
        local = local.new_empty(0)
    elif src_data_rank is None or local.is_meta:
        replicated = [Replicate()] * device_mesh.ndim
        local = move_local(local, device_mesh, tensor.shape, replicated, wanted).wait()
    else:
        local = _scatter(local, device_mesh, wanted, src_data_rank)
    if local.untyped_storage()._cdata == tensor.untyped_storage()._cdata:  # nothing had to be moved or cut
        local = local.clone()
    return make_dtensor(local, spec, requires_grad=tensor.requires_grad)


def _scatter(whole: torch.Tensor, mesh: DeviceMesh, wanted: Sequence[Placement], source_rank: int) -> torch.Tensor:
    """Axis by axis, the rank at coordinate ``source_rank`` sends the others their parts of what it holds.

    On each axis in turn the tensor is ragged with everything on the source; a ragged axis is last because its cut is.
    """
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(wanted[axis], RaggedShard))
    placements: list[Placement] = [Replicate()] * mesh.ndim
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for axis in axes:
        owner = [int(rank == source_rank) for rank in range(mesh.size(axis))]
        before, after = list(placements), list(placements)
        before[axis], after[axis] = RaggedShard((), owner), wanted[axis]
        local = local.reshape(-1) if coordinate[axis] == source_rank else local.new_empty(0)
        local = move_local(local, mesh, whole.shape, before, after).wait()
        placements = after
    return local
