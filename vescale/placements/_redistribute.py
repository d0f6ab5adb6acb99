"""``redistribute`` and ``full_tensor`` for every placement, differentiable.

With stock placements only, these do what their stock namesakes do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Partial, Placement

from vescale.comm import Pending, all_gather_v, all_reduce, all_to_all_v, axis_group, keeps_result, reduce_scatter_v
from vescale.compat import (
    AsyncCollectiveTensor,
    as_async_tensor,
    expanded_as,
    local_of,
    make_dtensor,
    make_spec,
    partial_reduce,
    spec_of,
    stock,
)
from vescale.errors import OtherMeshError, PlacementError
from vescale.placements._custom_placement import has_custom
from vescale.placements._exchange_plan import exchange_axes, pack, plan_exchange, unpack, unpack_gathered
from vescale.placements._placement_kinds import (
    at_dim,
    contiguous_stride,
    is_sharded,
    ragged_axis,
    shard_dim,
    without_partials,
)
from vescale.placements._ragged import RaggedShard, StridedRaggedShard
from vescale.placements._region import largest_shape, local_region, same_regions

# Normalized placements: tensor dims counted from the front, ragged units decided and checked.


def normalize_placements(
    placements: Sequence[Placement], shape: Sequence[int], mesh: DeviceMesh | Sequence[int]
) -> tuple[Placement, ...]:
    """Resolve placements for a tensor of global ``shape`` on a mesh, or on the sizes of its axes; pure, the same on every
    rank.

    Negative dims become positive; a ragged placement without units is balanced; a :class:`RaggedShard` with ``Shard(0)``
    on a later axis becomes the :class:`StridedRaggedShard` that it means.

    Args:
        placements: one for each mesh axis.
        mesh: a mesh, or the sizes of its axes.

    Raises:
        ValueError: a placement count that is not the mesh's, dims out of range, several ragged axes, units that do not
            fit the axis or cover the tensor, a wrong ``split_factor``, pending reductions whose order would matter.
    """
    mesh_shape = tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
    if len(placements) != len(mesh_shape):
        raise PlacementError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {len(mesh_shape)} axes {mesh_shape}; "
            "pass one placement for each axis"
        )
    resolved = [_with_front_dim(placement, tuple(shape)) for placement in placements]
    pending = {placement.reduce_op for placement in resolved if type(placement) is Partial}
    if len(pending) > 1 and pending != {"sum", "avg"}:
        raise PlacementError(
            f"placements {tuple(placements)} mix pending reductions {sorted(pending)}, whose order would matter; use one "
            "operation (sum and avg go together), or redistribute one axis to Replicate() first"
        )
    axis = ragged_axis(resolved)
    if axis is not None:
        resolved[axis] = _resolve_ragged(resolved, axis, tuple(shape), mesh_shape)
        local_region(shape, resolved, mesh_shape, (0,) * len(mesh_shape))  # checks the units against the tensor
    return tuple(resolved)


def _with_front_dim(placement: Placement, shape: tuple[int, ...]) -> Placement:
    dim = shard_dim(placement)
    if dim is None:
        return placement
    if not -len(shape) <= dim < len(shape):
        raise PlacementError(
            f"{placement!r} names tensor dim {dim}, but the tensor has shape {shape}; use a dim in "
            f"[{-len(shape)}, {len(shape)})"
        )
    return placement if dim >= 0 else at_dim(placement, dim + len(shape))


def _resolve_ragged(
    placements: list[Placement], axis: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> RaggedShard:
    placement = placements[axis]
    assert isinstance(placement, RaggedShard)
    others: list[Placement] = [p for a, p in enumerate(placements) if a != axis]
    other_sizes = tuple(n for a, n in enumerate(mesh_shape) if a != axis)
    held = largest_shape(shape, tuple(others), other_sizes)
    inner_dims = [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0]
    num_pieces = 1
    for later in range(axis + 1, len(placements)):
        if shard_dim(placements[later]) == 0:
            num_pieces *= mesh_shape[later]
    if isinstance(placement, StridedRaggedShard):
        if placement.split_factor != num_pieces:
            raise PlacementError(
                f"{placement!r} on mesh axis {axis}: split_factor={placement.split_factor}, but the Shard(0) axes after "
                f"it cut dim 0 into {num_pieces} pieces ({tuple(placements)} on mesh {mesh_shape}); write "
                + (f"split_factor={num_pieces}" if num_pieces > 1 else "RaggedShard")
            )
    elif num_pieces > 1:
        placement = StridedRaggedShard(placement.dims, placement.local_units, placement.block, split_factor=num_pieces)
    return placement.resolve(held, mesh_shape[axis], inner_dims)


# Specs of contiguous DTensors, and the placements of gradients.


def resolve_gradient(
    caller: str,
    placements: Sequence[Placement],
    grad_placements: Sequence[Placement] | None,
    shape: Sequence[int],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """The placements of a gradient: those given, or the tensor's own without Partial.

    Raises ValueError when they give a rank other elements than the tensor's placements do.
    """
    if grad_placements is None:
        return without_partials(placements)
    gradient = normalize_placements(grad_placements, shape, mesh)
    if not same_regions(tuple(shape), tuple(placements), gradient, tuple(mesh.shape)):
        raise PlacementError(
            f"{caller}: grad_placements {gradient} assign other elements to a rank than placements "
            f"{tuple(placements)}, but the gradient of a local tensor has its shape; keep the sharded axes as they "
            "are, and use Replicate or Partial on the others"
        )
    return gradient


def contiguous_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> Any:
    return make_spec(mesh, placements, shape, contiguous_stride(shape), dtype)


# The steps of a change of placements: which axes are reduced in which order, and what is exchanged afterwards. Pure.
# Python (``_local_redistribution.py``) and C++ (``_native_moves.py``) run the same steps, with the same collectives:
# one rank may observe them, and therefore run them in Python, while its peers do not.

Placements = tuple[Placement, ...]
Kind = Literal["own reduction", "clone", "all-reduce", "reduce-scatter", "exchange"]
_REDUCE_OPS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Step:
    """One step, from placements to placements.

    Attributes:
        kind: ``own reduction``: the placement knows how to reduce itself; ``clone``: nothing to reduce, but new memory;
            ``exchange``: everything but reductions.
        axis: the mesh axis that is reduced; -1 for an exchange.
    """

    kind: Kind
    before: Placements
    after: Placements
    axis: int = -1


def move_steps(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``; none if they are equal. Not cached: a masked partial holds a tensor."""
    shape, mesh_shape, source, target = tuple(shape), tuple(mesh_shape), tuple(source), tuple(target)
    steps: list[Step] = []
    held = source
    for axis in _reduction_order(source, target):
        kind, becomes = _reduction(shape, mesh_shape, held, target, axis)
        after = (*held[:axis], becomes, *held[axis + 1 :])
        steps.append(Step(kind, held, after, axis))
        held = after
    if held != target:
        steps.append(Step("exchange", held, target))
    return tuple(steps)


def _reduction_order(source: Placements, target: Placements) -> list[int]:
    """The Partial axes to reduce: reduce-scatters first, so that the others reduce less, a ragged one last of them."""
    axes = [a for a, (s, t) in enumerate(zip(source, target)) if s.is_partial() and s != t]
    return sorted(axes, key=lambda a: (not is_sharded(target[a]), isinstance(target[a], RaggedShard)))


def _reduction(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axis: int
) -> tuple[Kind, Placement]:
    """How one Partial axis is reduced, and what the result has there."""
    partial = source[axis]
    if type(partial) is not Partial or partial.reduce_op not in _REDUCE_OPS:
        return "own reduction", Replicate()  # masked or norm partials
    if mesh_shape[axis] == 1:
        return "clone", Replicate()
    scattered = _scattered(shape, mesh_shape, source, target, axis)
    return ("all-reduce", Replicate()) if scattered is None else ("reduce-scatter", scattered)


def _scattered(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axis: int
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
    held = largest_shape(shape, source, mesh_shape)
    inner = [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0]
    return RaggedShard().resolve(held, mesh_shape[axis], inner)


def check_partials(source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype) -> None:
    """Refuse what has no meaning, before any communication."""
    for axis, (before, after) in enumerate(zip(source, target)):
        if before == after:
            continue
        for partial in (before, after):
            if type(partial) is not Partial:
                continue
            inexact = partial.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex)
            if inexact or (partial.reduce_op in ("max", "min") and dtype.is_complex):
                raise PlacementError(
                    f"cannot redistribute {before} to {after} on mesh axis {axis}: {partial.reduce_op} of {dtype} values "
                    "is not defined; convert the tensor to a floating-point dtype first"
                )
        if not after.is_partial():
            continue
        if before.is_partial():
            raise PlacementError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: pending reductions with different "
                "operations cannot be converted into each other; redistribute to Replicate() first"
            )
        if type(after) is not Partial or after.reduce_op not in ("sum", "avg", "max", "min"):
            raise PlacementError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: the term of each rank is not defined; "
                "use Partial with sum, avg, max or min"
            )


def exchanged_axes(step: Step, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The axes over which an exchange communicates."""
    return tuple(axis for axis in exchange_axes(step.before, step.after) if mesh_shape[axis] > 1)


def _becoming_partial(step: Step) -> list[tuple[int, Partial]]:
    changed = enumerate(zip(step.before, step.after))
    return [(axis, after) for axis, (before, after) in changed if isinstance(after, Partial) and before != after]


def neutral_value(step: Step, dtype: torch.dtype) -> float | int | None:
    """What an exchange fills the new local tensor with first: the value that does not change the reduction into which
    sharded data is embedded, and of sums, so that the memory has the same strides on all ranks. None: it writes all
    elements."""
    ops = [
        partial.reduce_op
        for axis, partial in _becoming_partial(step)
        if is_sharded(step.before[axis]) or partial.reduce_op == "sum"
    ]
    if not ops:
        return None
    if ops[0] in ("sum", "avg"):
        return 0
    if dtype == torch.bool:
        return int(ops[0] == "min")
    if dtype.is_floating_point:
        return float("-inf") if ops[0] == "max" else float("inf")
    return torch.iinfo(dtype).min if ops[0] == "max" else torch.iinfo(dtype).max


def keeps_expanded(source: Sequence[Placement], target: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    """Whether dims that are expanded stay so: nothing is communicated, reduced, filled, or made flat."""
    return ragged_axis(target) is None and all(
        before == after
        or not (
            before.is_partial()
            or (is_sharded(before) and (size > 1 or after.is_partial()))
            or (isinstance(after, Partial) and after.reduce_op == "sum")
        )
        for before, after, size in zip(source, target, mesh_shape)
    )


def contribution_factors(step: Step, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    """What turns values into this rank's contribution to the reductions that become pending; 0 sets everything to zero."""
    factors = []
    for axis, partial in _becoming_partial(step):
        if partial.reduce_op == "avg" and is_sharded(step.before[axis]):
            factors.append(mesh_shape[axis])
        if partial.reduce_op == "sum" and not is_sharded(step.before[axis]) and coordinate[axis] != 0:
            factors.append(0)
    return tuple(factors)


# Redistribution of local tensors: which collective each change of placement runs.
#
# =========================  ============================================================================================
# on an axis                 what is done
# =========================  ============================================================================================
# ``Partial -> sharded``     reduce-scatter: ``(n-1)/n`` of the tensor is sent (all-reduce when another axis stays ragged)
# ``Partial -> Replicate``   all-reduce
# ``Partial -> other op``    not defined: ValueError
# sharded/Replicate -> any   one exchange over all axes whose owners change: an all-gather where everyone receives
#                            everything, else an all-to-all that moves only the elements that change owner; nothing
#                            where no element does
# ``Replicate -> sharded``   local copy
# ``any -> Partial``         local: sharded data is embedded in the neutral element, replicated data stays on the first
#                            rank of the axis (sum) or on all (avg, max, min)
# =========================  ============================================================================================


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
        return Pending(local.clone(memory_format=torch.contiguous_format))
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
        if neutral is None:
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


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Change a DTensor's placements; differentiable, also twice.

    Any of Ragged, StridedRagged, Interleaved, Shard, Replicate and Partial (sum, avg, max, min) to any other, except one
    pending reduction to another. Communication: see ``vescale/placements/_redistribute.py``.

    Args:
        placements: one for each mesh axis.
        async_op: return before the last collective has finished; the local tensor waits on first use. The backward
            redistribution is asynchronous then, too.
        forward_dtype: cast to this dtype before communicating; the result has it. None: keep.
        backward_dtype: communicate gradients in this dtype; they then get the input's. None: the input's.
        dtensor: any DTensor.
        device_mesh: None, or the tensor's own.

    Raises:
        NotImplementedError: another mesh than the tensor's.
        ValueError: placements that do not fit, on every rank before any communication.
    """
    mesh = spec_of(dtensor).mesh
    if placements is None:
        raise RuntimeError("redistribute needs placements=; pass one for each mesh axis")
    if not has_custom([*placements, *dtensor.placements]) and not any(p.is_partial() for p in placements):
        return stock().redistribute(
            dtensor,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )
    if device_mesh is not None and device_mesh != mesh:
        raise OtherMeshError(
            f"redistribute from mesh {mesh} to mesh {device_mesh}: both must be the same; use full_tensor() first"
        )
    wanted = normalize_placements(placements, dtensor.shape, mesh)
    own = dtensor.dtype
    return Redistribute.apply(
        dtensor, wanted, async_op, forward_dtype or own, forward_dtype or own, backward_dtype or own
    )


class Redistribute(torch.autograd.Function):
    """Forward: any placements to any. Backward: the gradient goes back to the input's placements, Replicate for Partial
    (every rank's contribution has the whole gradient)."""

    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        placements: tuple[Placement, ...],
        async_op: bool,
        moved_dtype: torch.dtype,
        result_dtype: torch.dtype,
        backward_dtype: torch.dtype,
    ) -> DTensor:
        local, spec = local_of(dtensor), spec_of(dtensor)
        ctx.placements, ctx.dtype = spec.placements, local.dtype
        ctx.async_op, ctx.backward_dtype = async_op, backward_dtype
        if local.dtype != moved_dtype:
            local = local.to(moved_dtype)
        if spec.placements == placements:
            moved = local.view_as(local)
            stride = dtensor.stride()
        else:
            pending = move_local(local, spec.mesh, dtensor.shape, spec.placements, placements)
            moved = as_async_tensor(pending.out, pending) if async_op else pending.wait()
            stride = contiguous_stride(dtensor.shape)
        if moved.dtype != result_dtype:
            moved = moved.to(result_dtype)
        result = make_spec(spec.mesh, placements, dtensor.shape, stride, moved.dtype)
        return make_dtensor(moved, result, requires_grad=dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        target = without_partials(ctx.placements)
        moved = Redistribute.apply(grad, target, ctx.async_op, ctx.backward_dtype, ctx.dtype, grad.dtype)
        return moved, None, None, None, None, None


def redistribute_local(local: torch.Tensor, current: Any, target: Any, *, async_op: bool = False) -> torch.Tensor:
    """``redistribute`` on local tensors and specs, outside autograd: what the op dispatcher calls."""
    pending = move_local(local, current.mesh, current.shape, current.placements, target.placements)
    return as_async_tensor(pending.out, pending) if async_op and pending.out is not local else pending.wait()


def full_tensor(dtensor: DTensor, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """The global tensor on every rank; differentiable. Communicates as ``redistribute`` to Replicate does.

    ``grad_placements``, of Replicate and Partial, are those of the gradient of the returned tensor; None: Replicate.

    Args:
        dtensor: any DTensor.
    """
    replicated = [Replicate()] * dtensor.device_mesh.ndim
    gradient = resolve_gradient("full_tensor", replicated, grad_placements, dtensor.shape, dtensor.device_mesh)
    local = redistribute(dtensor, None, replicated).to_local(grad_placements=gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
