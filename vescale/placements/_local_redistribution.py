"""Redistribution of local tensors: which collective each change of placement runs.

=========================  ============================================================================================
on an axis                 what is done
=========================  ============================================================================================
``Partial -> sharded``     reduce-scatter: ``(n-1)/n`` of the tensor is sent (all-reduce when another axis stays ragged)
``Partial -> Replicate``   all-reduce
``Partial -> other op``    not defined: ValueError
sharded/Replicate -> any   one exchange over all axes whose owners change: an all-gather where everyone receives
                           everything, else an all-to-all that moves only the elements that change owner; nothing
                           where no element does
``Replicate -> sharded``   local copy
``any -> Partial``         local: sharded data is embedded in the neutral element, replicated data stays on the first
                           rank of the axis (sum) or on all (avg, max, min)
=========================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Partial, Placement

from vescale.comm import Pending, all_gather_v, all_reduce, all_to_all_v, axis_group, reduce_scatter_v
from vescale.compat import AsyncCollectiveTensor, partial_reduce
from vescale.placements._exchange_plan import (
    exchange_axes,
    pack,
    plan_exchange,
    unpack,
    unpack_gathered,
)
from vescale.placements._placement_kinds import is_sharded, ragged_axis, shard_dim
from vescale.placements._ragged import RaggedShard
from vescale.placements._region import largest_shape

__all__ = ["move_local"]

_REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def move_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: Sequence[Placement],
    target: Sequence[Placement],
) -> Pending:
    """Bring this rank's ``local`` part of a tensor of global ``shape`` from ``source`` to ``target`` placements.

    Placements are normalized (see :func:`vescale.placements.normalize_placements`). Returns the new local tensor as a
    :class:`~vescale.comm.Pending`: its last collective may be in flight. The result shares no memory with ``local``,
    unless the placements are equal. Communication as in the module's table.

    Raises:
        ValueError: a pending reduction that cannot become the other one, or has no meaning for the dtype; on every
            rank of the world, before any communication.
    """
    source, target = list(source), list(target)
    if source == target:
        return Pending(local)
    _check_partials(source, target, local.dtype)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Pending(local)  # ranks outside the mesh hold an empty tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = local.resolve_conj().resolve_neg()  # collectives move the memory as it is
    requester = f"redistribute {_text(source)} -> {_text(target)}"
    pending = Pending(local)
    for axis in _reduction_order(source, target):
        pending = _reduce(pending.wait(), mesh, shape, source, target, axis, coordinate, requester)
    if source == target:
        return pending
    return _exchange(pending.wait(), mesh, shape, source, target, coordinate, requester)


def _check_partials(source: list[Placement], target: list[Placement], dtype: torch.dtype) -> None:
    """Refuse what has no meaning, before any communication."""
    for axis, (before, after) in enumerate(zip(source, target)):
        if before == after:
            continue
        for partial in (before, after):
            if type(partial) is not Partial:
                continue
            inexact = partial.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex)
            if inexact or (partial.reduce_op in ("max", "min") and dtype.is_complex):
                raise ValueError(
                    f"cannot redistribute {before} to {after} on mesh axis {axis}: {partial.reduce_op} of {dtype} values "
                    "is not defined; convert the tensor to a floating-point dtype first"
                )
        if not after.is_partial():
            continue
        if before.is_partial():
            raise ValueError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: pending reductions with different "
                "operations have no common meaning; redistribute to Replicate() first"
            )
        if type(after) is not Partial or after.reduce_op not in ("sum", "avg", "max", "min"):
            raise ValueError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: no contribution of each rank is defined "
                "for it; use Partial with sum, avg, max or min"
            )


def _reduction_order(source: list[Placement], target: list[Placement]) -> list[int]:
    """The Partial axes to reduce: reduce-scatters first, so that the others reduce less, a ragged one last of them."""
    axes = [a for a, (s, t) in enumerate(zip(source, target)) if s.is_partial() and s != t]
    return sorted(axes, key=lambda a: (not is_sharded(target[a]), isinstance(target[a], RaggedShard)))


def _reduce(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: list[Placement],
    target: list[Placement],
    axis: int,
    coordinate: Sequence[int],
    requester: str,
) -> Pending:
    """Reduce one Partial axis; updates ``source`` to what the result has there."""
    partial = source[axis]
    if type(partial) is not Partial or partial.reduce_op not in _REDUCE_OPS:
        source[axis] = Replicate()  # masked or norm partials know how to reduce themselves
        return Pending(partial_reduce(partial, local, mesh, axis))
    if mesh.size(axis) == 1:
        source[axis] = Replicate()
        return Pending(local.clone())  # nothing to reduce, but the result is new memory
    group = axis_group(mesh, (axis,))
    scattered = _scattered(shape, tuple(mesh.shape), source, target, axis)
    if scattered is None:
        source[axis] = Replicate()
        return all_reduce(local, partial.reduce_op, group.group, requester=requester)
    held = list(source)
    source[axis] = scattered
    # Each rank holds a contribution to everything that its peers receive, so it sends to each of them.
    plan = plan_exchange(shape, tuple(mesh.shape), held, source, coordinate, group.coordinates)
    send = pack(local, plan.sends, plan.send_span)
    sizes = [piece.numel for piece in plan.sends]
    out = local.new_empty(plan.target.local_shape)
    if plan.keeps_in_place:
        reduced = reduce_scatter_v(send, sizes, partial.reduce_op, group.group, out=out.view(-1), requester=requester)
        return reduced.reshaped(out)
    reduced = reduce_scatter_v(send, sizes, partial.reduce_op, group.group, requester=requester)
    return Pending(out, [reduced], lambda: unpack(reduced.out, [plan.kept], out))


def _scattered(
    shape: Sequence[int], mesh_shape: tuple[int, ...], source: list[Placement], target: list[Placement], axis: int
) -> Placement | None:
    """The placement that a reduce-scatter on a Partial axis can leave there, or None when it must be an all-reduce.

    A rank's part of the result must be within what it holds now: a ragged cut comes last, so it always does; a
    shard-like one does unless a later axis cuts the same dim. Where the target's own cut does not, a balanced ragged
    one stands in, and the exchange that follows does the rest.
    """
    wanted = target[axis]
    others = [p for a, p in enumerate(source) if a != axis]
    if not is_sharded(wanted) or ragged_axis(others) is not None:
        return None
    if isinstance(wanted, RaggedShard):
        wanted_others = [p for a, p in enumerate(target) if a != axis]
        fits = all(s == t or (s.is_partial() and t.is_replicate()) for s, t in zip(others, wanted_others))
    else:
        fits = all(shard_dim(later) != shard_dim(wanted) for later in source[axis + 1 :])
    if fits:
        return wanted
    held = largest_shape(tuple(shape), tuple(source), mesh_shape)
    inner = [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0]
    return RaggedShard().resolve(held, mesh_shape[axis], inner)


def _exchange(
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    source: list[Placement],
    target: list[Placement],
    coordinate: Sequence[int],
    requester: str,
) -> Pending:
    """Everything but reductions; see the module's table."""
    becoming = [a for a, (s, t) in enumerate(zip(source, target)) if t.is_partial() and s != t]
    axes = tuple(axis for axis in exchange_axes(source, target) if mesh.size(axis) > 1)
    own = tuple(coordinate)
    group = axis_group(mesh, axes) if axes else None
    plan = plan_exchange(shape, tuple(mesh.shape), source, target, own, group.coordinates if group else (own,))
    out = local.new_empty(plan.target.local_shape)
    embedded = [axis for axis in becoming if is_sharded(source[axis])]
    if embedded:
        partial = target[embedded[0]]
        assert isinstance(partial, Partial)
        out.fill_(_neutral(partial.reduce_op, out.dtype))
    if group is None or not plan.moves:
        for box_from, box_to in zip(plan.kept.source, plan.kept.target):
            box_to.view(out).copy_(box_from.view(local))
        pending = Pending(out)
    elif plan.gathers:
        sizes = [region.numel for region in plan.peer_sources]
        sender = local.reshape(-1)
        if plan.receives_in_place:
            pending = all_gather_v(sender, sizes, group.group, out=out.view(-1), requester=requester)
        else:
            gathered = all_gather_v(sender, sizes, group.group, requester=requester)
            pending = Pending(out, [gathered], lambda: unpack_gathered(gathered.out, plan, out))
    else:
        send = pack(local, plan.sends, plan.send_span)
        send_sizes = [piece.numel for piece in plan.sends]
        receive_sizes = [piece.numel for piece in plan.receives]
        if plan.receives_in_place:
            pending = all_to_all_v(send, send_sizes, receive_sizes, group.group, out=out.view(-1), requester=requester)
        else:
            received = all_to_all_v(send, send_sizes, receive_sizes, group.group, requester=requester)
            pending = Pending(out, [received], lambda: unpack(received.out, plan.receives, out))
    return Pending(out, [pending], lambda: _contribute(out, mesh, source, target, becoming, coordinate))


def _contribute(
    out: torch.Tensor,
    mesh: DeviceMesh,
    source: list[Placement],
    target: list[Placement],
    becoming: list[int],
    coordinate: Sequence[int],
) -> None:
    """Turn values into what this rank contributes to the reductions that become pending."""
    for axis in becoming:
        partial = target[axis]
        assert isinstance(partial, Partial)
        if partial.reduce_op == "avg" and is_sharded(source[axis]):
            out.mul_(mesh.size(axis))
        if partial.reduce_op == "sum" and not is_sharded(source[axis]) and coordinate[axis] != 0:
            out.zero_()


def _neutral(op: str, dtype: torch.dtype) -> float | int:
    """The value that does not change a reduction."""
    if op in ("sum", "avg"):
        return 0
    if dtype == torch.bool:
        return int(op == "min")
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _text(placements: Sequence[Placement]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"
