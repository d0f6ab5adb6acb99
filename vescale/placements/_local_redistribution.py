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
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import Pending, all_gather_v, all_reduce, all_to_all_v, axis_group, keeps_result, reduce_scatter_v
from vescale.compat import AsyncCollectiveTensor, expanded_as, partial_reduce
from vescale.placements._exchange_plan import pack, plan_exchange, unpack, unpack_gathered
from vescale.placements._move_steps import (
    Step,
    check_partials,
    contribution_factors,
    exchanged_axes,
    move_steps,
    neutral_value,
)

__all__ = ["move_local"]


@keeps_result
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
    check_partials(source, target, local.dtype)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Pending(local)  # ranks outside the mesh hold an empty tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = local.resolve_conj().resolve_neg()  # collectives move the memory as it is
    requester = f"redistribute {_text(source)} -> {_text(target)}"
    pending = Pending(local)
    for step in move_steps(shape, tuple(mesh.shape), source, target):
        run = _exchange if step.kind == "exchange" else _reduce
        pending = run(step, pending.wait(), mesh, shape, coordinate, requester)
    return pending


def _reduce(
    step: Step, local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], coordinate: Sequence[int], requester: str
) -> Pending:
    """Reduce one Partial axis."""
    partial: Any = step.before[step.axis]
    if step.kind == "own reduction":
        return Pending(partial_reduce(partial, local, mesh, step.axis))
    if step.kind == "clone":
        return Pending(local.clone())
    group = axis_group(mesh, (step.axis,))
    if step.kind == "all-reduce":
        return all_reduce(local, partial.reduce_op, group.group, requester=requester)
    # Each rank holds a contribution to everything that its peers receive, so it sends to each of them.
    plan = plan_exchange(shape, tuple(mesh.shape), step.before, step.after, coordinate, group.coordinates)
    send = pack(local, plan.sends, plan.send_span)
    sizes = [piece.numel for piece in plan.sends]
    out = local.new_empty(plan.target.local_shape)
    if plan.keeps_in_place:
        reduced = reduce_scatter_v(send, sizes, partial.reduce_op, group.group, out=out.view(-1), requester=requester)
        return reduced.reshaped(out)
    reduced = reduce_scatter_v(send, sizes, partial.reduce_op, group.group, requester=requester)
    return Pending(out, [reduced], lambda: unpack(reduced.out, [plan.kept], out))


def _exchange(
    step: Step, local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], coordinate: Sequence[int], requester: str
) -> Pending:
    """Everything but reductions; see the module's table."""
    axes = exchanged_axes(step, tuple(mesh.shape))
    own = tuple(coordinate)
    group = axis_group(mesh, axes) if axes else None
    plan = plan_exchange(shape, tuple(mesh.shape), step.before, step.after, own, group.coordinates if group else (own,))
    out = local.new_empty(plan.target.local_shape)
    neutral = neutral_value(step, out.dtype)
    if neutral is not None:
        out.fill_(neutral)
    if group is None or not plan.moves:
        for box_from, box_to in zip(plan.kept.source, plan.kept.target):
            box_to.view(out).copy_(box_from.view(local))
        if neutral is None and not contribution_factors(step, tuple(mesh.shape), own):
            out = expanded_as(local, out)
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
    return Pending(out, [pending], lambda: _contribute(out, contribution_factors(step, tuple(mesh.shape), own)))


def _contribute(out: torch.Tensor, factors: Sequence[int]) -> None:
    for factor in factors:
        out.mul_(factor) if factor else out.zero_()  # also infinities


def _text(placements: Sequence[Placement]) -> str:
    return "(" + ", ".join(map(str, placements)) + ")"
