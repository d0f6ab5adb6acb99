"""Elementwise ops: run on the local tensors once all operands lie as one of them does."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, TensorMeta
from vescale.placements._kinds import has_custom, ragged_axis
from vescale.placements._move import move_local
from vescale.placements._rules._call import Decision, OpCall, Placements, names

__all__ = ["Alignment", "align", "elementwise_rule", "is_elementwise"]

# Elementwise ops that torch does not tag as pointwise, by name.
_UNTAGGED = names(
    "copy_ fill_ zero_ detach detach_ alias _to_copy clone lift_fresh masked_fill masked_fill_ _conj _neg_view "
    "_conj_physical conj_physical abs_ copysign_ float_power polygamma_ xlogy_ __irshift__ __ilshift__ isneginf "
    "isposinf native_dropout_backward fill hardswish hardswish_ hardswish_backward softplus_backward elu_backward "
    "leaky_relu_backward hardtanh_backward hardsigmoid_backward mish_backward hardshrink_backward softshrink_backward"
)

# Ops whose results are sums (averages) of what each rank would compute from its own contribution, by name.
_ADDITIVE = names("add add_ sub sub_ copy_ _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_copy_")
_LINEAR_IN_FIRST = names("mul mul_ div div_ _foreach_mul _foreach_mul_ _foreach_div _foreach_div_")
_LINEAR_IN_SECOND = names("mul _foreach_mul")
_UNARY_LINEAR = names("neg neg_ _foreach_neg _foreach_neg_")
# Ops that any pending reduction passes through.
_TRANSPARENT = names("clone detach detach_ alias positive lift_fresh copy_ zero_ _foreach_copy_ _foreach_zero_")


def is_elementwise(op: Any) -> bool:
    """Whether each element of the results depends on the operands' elements at the same place only."""
    packet = op.overloadpacket
    name = packet.__name__
    if name in _UNTAGGED or torch.Tag.pointwise in op.tags:
        return True
    overload = op._overloadname
    if name.endswith("_") and not name.startswith("_"):  # the in-place form of a tagged op
        packet = getattr(torch.ops.aten, name[:-1], None)
    elif overload == "out" or "grad_input" in overload:
        overload = "default"
    elif overload.endswith("_out"):
        overload = overload.removesuffix("_out")
    functional = getattr(packet, overload, None) if packet is not None else None
    return functional is not None and torch.Tag.pointwise in functional.tags


def elementwise_rule(call: OpCall) -> Decision | None:
    """No communication when all operands lie alike; else the others are moved to where the leader lies.

    The leader is the tensor that is written to, or the first operand with one of our placements that has the result's
    shape. Replicated operands are sliced. Operands that are broadcast are replicated, then expanded and sliced. A result
    keeps the leader's placement.
    """
    if not is_elementwise(call.op):
        return None
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands))
    alignment = align(call.name, call.operands, shape, call.mutated)
    if alignment is None:
        return None
    if alignment.broadcasts and not alignment.is_ragged:
        ragged = [ragged_axis(spec.placements) is not None for spec in call.operands]
        if has_custom(alignment.leader) and not any(ragged):
            return None  # an interleaved leader: see the stand-ins
        inputs = tuple(
            wanted if is_ragged else spec.placements
            for spec, wanted, is_ragged in zip(call.operands, alignment.inputs, ragged)
        )
        return Decision(inputs, redispatch=True)
    num_results = 1 if isinstance(call.meta, TensorMeta) else len(call.meta)
    return Decision(alignment.inputs, (alignment.leader,) * num_results, prepare=alignment.prepare)


class Alignment:
    """Where the operands of one elementwise computation go.

    Attributes:
        leader: the placements of the results.
        inputs: the placements that each operand is brought to.
        prepare: what is done to operands of another shape than the results, see :class:`Decision`.
        broadcasts: whether an operand with more than one element is broadcast.
    """

    def __init__(self, leader: Placements, operands: Sequence[DTensorSpec], shape: torch.Size) -> None:
        self.leader = leader
        self.is_ragged = ragged_axis(leader) is not None
        self.broadcasts = False
        self.inputs: tuple[Placements, ...] = ()
        self.prepare: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
        for index, spec in enumerate(operands):
            self._place(index, spec, shape)

    def _place(self, index: int, spec: DTensorSpec, shape: torch.Size) -> None:
        if spec.shape == shape:
            self.inputs += (self.leader,)
            return
        self.inputs += (_replicated(spec),)
        if math.prod(spec.shape) == 1:
            if self.is_ragged and spec.ndim > 1:  # the local tensors that it meets are flat
                self.prepare += ((index, _as_vector),)
            return
        self.broadcasts = True
        if self.is_ragged:
            self.prepare += ((index, functools.partial(_expand_and_slice, spec.mesh, tuple(shape), self.leader)),)


def align(
    name: str,
    operands: Sequence[DTensorSpec],
    shape: torch.Size,
    mutated: Sequence[int],
    *,
    stock_may_lead: bool = False,
) -> Alignment | None:
    """Where the operands of an elementwise op go; None when no operand can lead.

    Raises RuntimeError when operands that are not single numbers lie on different meshes.
    """
    same_shape = [index for index, spec in enumerate(operands) if spec.shape == shape]
    written = [index for index in same_shape if index in mutated]
    custom = [index for index in same_shape if has_custom(operands[index].placements)]
    leads = (written or custom or (same_shape if stock_may_lead else []))[:1]
    if not leads:
        return None
    if shape == () and len(operands) > 1 and not mutated and not stock_may_lead:
        return None  # one-element local tensors promote types unlike numbers
    leader = operands[leads[0]]
    for spec in operands:
        if spec.mesh != leader.mesh and math.prod(spec.shape) != 1:
            raise RuntimeError(
                f"{name}: operands of shapes {tuple(leader.shape)} and {tuple(spec.shape)} lie on different meshes "
                f"{leader.mesh} and {spec.mesh}; bring them to one mesh through full_tensor() and distribute_tensor()"
            )
    target = tuple(
        placement
        if not _pending_on(axis, operands, shape)
        else _settle(name, axis, operands, shape, leads[0], bool(written))
        for axis, placement in enumerate(leader.placements)
    )
    alignment = Alignment(target, operands, shape)
    alignment.inputs = tuple(
        _keep_pending(name, index, spec, wanted, target, shape)
        for index, (spec, wanted) in enumerate(zip(operands, alignment.inputs))
    )
    return alignment


def _pending_on(axis: int, operands: Sequence[DTensorSpec], shape: torch.Size) -> bool:
    return any(
        spec.shape == shape and axis < spec.mesh.ndim and spec.placements[axis].is_partial() for spec in operands
    )


def _settle(
    name: str, axis: int, operands: Sequence[DTensorSpec], shape: torch.Size, leader: int, is_written: bool
) -> Placement:
    """What the results have on an axis where an operand is Partial: its Partial if the op passes it on, else Replicate
    (or the leader's own placement)."""
    found = [spec.placements[axis] if spec.shape == shape else Replicate() for spec in operands]
    own = found[leader]
    partials = [placement for placement in found if placement.is_partial()]
    first = partials[0]
    passes = False
    if first.is_partial("sum") or first.is_partial("avg"):
        if name in _ADDITIVE:  # one operand: the other is a Python number, which is not to be added on every rank
            passes = len(found) > 1 and all(
                placement == first or _is_summand(first, placement, spec, shape)
                for placement, spec in zip(found, operands)
            )
            passes = passes and (own == first or not is_written)
        elif len(partials) == 1 and (name in _LINEAR_IN_FIRST or name in _LINEAR_IN_SECOND):
            passes = found.index(first) == 0 or name in _LINEAR_IN_SECOND
            passes = passes and all(p == first or p.is_replicate() for p in found)
        elif name in _UNARY_LINEAR:
            passes = True
    if name in _TRANSPARENT:
        passes = all(placement == first for placement in found)
    if passes:
        return first
    return Replicate() if own.is_partial() else own


def _is_summand(pending: Placement, own: Placement, spec: DTensorSpec, shape: torch.Size) -> bool:
    """Whether an operand can be one more contribution to a pending sum: whole everywhere, it is that of the first rank."""
    return pending.is_partial("sum") and own.is_replicate() and spec.shape == shape


def _keep_pending(
    name: str, index: int, spec: DTensorSpec, wanted: Placements, target: Placements, shape: torch.Size
) -> Placements:
    """A factor of a pending sum is not pending itself: it stays Replicate where the product is Partial."""
    if name not in _LINEAR_IN_FIRST or spec.shape != shape:
        return wanted
    return tuple(
        Replicate() if result.is_partial() and not own.is_partial() else placement
        for placement, result, own in zip(wanted, target, spec.placements)
    )


def _replicated(spec: DTensorSpec) -> Placements:
    return (Replicate(),) * spec.mesh.ndim


def _as_vector(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(1)


def _expand_and_slice(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, whole: torch.Tensor
) -> torch.Tensor:
    """This rank's part of a replicated tensor that is broadcast to ``shape``; nothing is communicated."""
    held = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    return move_local(whole.expand(shape), mesh, shape, [Replicate()] * mesh.ndim, held).wait()
